// The cells of a decoding step. Some reduce over the units of their head: the eight units of a tile then contribute a
// Partial for each sequence, which the thread blocks exchange.
#pragma once
#include "decoding/kernels/exchange.cuh"
#include "kernels/partial.cuh"

// The reductions of a lane that has UNITS units of a sequence. LANES consecutive lanes have all units of a
// contribution.
template <int UNITS, int LANES>
struct UnitReductions {
  static constexpr int OF_TILE = 8 / (UNITS * LANES), OF_HEAD = D / 8 * OF_TILE;  // contributions
  CountingBarrier& grid;
  float* partials;  // [HEAD_EXCHANGES, B, WIDTH / 8 * OF_TILE, 4 * EXCHANGED_VECTORS]
  const i64 B;
  const bool publishes;  // whether this lane stores the contribution
  const int contribution, sequence;

  // Reduces SUMS values, then MOMENTS, then MAXIMA over the units of the head. The results are the sums, mean and
  // variance of each moment, then the maxima. NUMBER: of the exchange in the step. All threads of all blocks that have
  // units call this together.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA, int CELLS>
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    static_assert(CELLS == UNITS);
    Part part = of_unit<Part>(values, 0);
    UNROLL for (int i = 1; i < UNITS; i++) part.add(of_unit<Part>(values, i), 1);
    float units = UNITS;
    add_lanes(part, units);
    if (publishes && sequence < B) {
      uint4* to = reinterpret_cast<uint4*>(place(NUMBER, contribution));
      UNROLL for (int i = 0; i < Part::VECTORS; i++) store_b128(to + i, reinterpret_cast<const uint4*>(part.words)[i]);
    }
    grid.arrive(UNIT_BLOCKS);
    grid.wait();
    const Part total = total_of_head<Part>(NUMBER);
    UNROLL for (int i = 0; i < Part::RESULTS; i++)
      UNROLL for (int k = 0; k < UNITS; k++) result[i][k] = total.result(i);
  }

  // Returns the address of a contribution to exchange `number`.
  DEVICE float* place(int number, int index) const {
    const i64 valid = min(i64(sequence), B - 1);
    return partials + ((number * B + valid) * (WIDTH / 8 * OF_TILE) + index) * (4 * EXCHANGED_VECTORS);
  }
  // Returns the contribution of the lane's unit q alone.
  template <class Part, int NUMBERS, int CELLS>
  DEVICE static Part of_unit(const float (&values)[NUMBERS][CELLS], int q) {
    Part part = {};
    UNROLL for (int i = 0; i < Part::SUMS; i++) part.words[i] = values[i][q];
    UNROLL for (int i = 0; i < Part::MOMENTS + Part::MAXIMA; i++)
      part.words[Part::ADDED + i] = values[Part::SUMS + i][q];
    return part;
  }
  // Adds up the contributions of LANES lanes, each of `units` units.
  template <class Part>
  DEVICE static void add_lanes(Part& part, float& units) {
    UNROLL for (int other = 1; other < LANES; other *= 2) {
      Part more;
      UNROLL for (int i = 0; i < Part::WORDS; i++) more.words[i] = __shfl_xor_sync(0xffffffffu, part.words[i], other);
      const float added = __shfl_xor_sync(0xffffffffu, units, other);
      part.add(more, added);
      units += added;
    }
  }
  // Returns the sum of all contributions of the head to exchange `number`. They must have arrived.
  template <class Part>
  DEVICE Part total_of_head(int number) const {
    const int lane = threadIdx.x % LANES, first = contribution / OF_HEAD * OF_HEAD;
    Part total = {}, other;
    UNROLL for (int i = Part::ADDED + Part::MOMENTS; i < Part::WORDS; i++) total.words[i] = -INFINITY;
    float units = 0;
    for (int i = lane; i < OF_HEAD; i += LANES) {
      const uint4* from = reinterpret_cast<const uint4*>(place(number, first + i));
      UNROLL for (int k = 0; k < Part::VECTORS; k++) reinterpret_cast<uint4*>(other.words)[k] = load_b128(from + k);
      if (i == lane) total = other;
      else total.add(other, UNITS * LANES);
      units += UNITS * LANES;
    }
    add_lanes(total, units);
    // Only the first lane is sure to have loaded a contribution, and so to have a shift that is one of the values.
    UNROLL for (int i = 0; i < Part::WORDS; i++)
      total.words[i] = __shfl_sync(0xffffffffu, total.words[i], threadIdx.x % 32 / LANES * LANES);
    return total;
  }
};

// Computes the new states of CELLS cells of each lane from the gates g and the old states.
template <int CELLS, class Units>
DEVICE void compute_cells(float (&g)[GATES][CELLS], const float (&old)[STATES][CELLS], float (&fresh)[STATES][CELLS],
                          const Units& units) {
#if REDUCES
  float statistics[STATISTICS > 0 ? STATISTICS : 1][CELLS], stored[GATES][CELLS];
  auto recurrent_gates = [](float (&)[GATES][CELLS]) {};  // already added, because R h is computed first
  cells_forward(g, old, recurrent_gates, fresh, statistics, stored, units);
#else
  UNROLL for (int q = 0; q < CELLS; q++) {
    float gates[GATES], before[STATES], after[STATES];
    UNROLL for (int j = 0; j < GATES; j++) gates[j] = g[j][q];
    UNROLL for (int k = 0; k < STATES; k++) before[k] = old[k][q];
    cell_forward(gates, before, after);
    UNROLL for (int k = 0; k < STATES; k++) fresh[k][q] = after[k];
  }
#endif
}
