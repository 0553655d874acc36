// The contribution of a warp's units (its part) to a reduction over the units of a head that several blocks share.
#pragma once
#include "kernels/partial.cuh"
#include "resident/kernels/cells.cuh"

// Each exchange of a step has a buffer, or two (see UnitReductions).
static_assert(!EARLY_SUMS || EXCHANGES == 2);
constexpr int EXCHANGE_BUFFERS = EARLY_SUMS ? 3 : EXCHANGES > 1 ? EXCHANGES : 2;
constexpr int exchange_of(int buffer) { return EARLY_SUMS ? buffer / 2 : buffer % EXCHANGES; }
constexpr int SEQUENCE_LANES = BOTH_UNITS ? 16 : 8;  // lanes of a warp with the same sequence
constexpr int PARTS = BLOCKS * CONTRIBUTIONS;         // parts of every sequence
// Returns the index of this warp's part.
DEVICE int own_part(const ThreadCoord& coord) {
  // A statement of its own: in one expression, the compiler orders instructions otherwise.
  const int contribution = coord.contribution();
  return coord.rank * CONTRIBUTIONS + contribution;
}

// Returns the number of units in a part.
DEVICE float units_of_part(int part) {
  return PADDED == D ? 16.0f / HOLDERS : max(min(D - part / HOLDERS * 16, 16), 0) / float(HOLDERS);
}

// Reduces the warp's units, for the sequence of the lane's pair p. All lanes of the warp call this.
template <int SUMS, int MOMENTS, int MAXIMA, class Part>
DEVICE void reduce_warp(Part& part, const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS], int p,
                        const ThreadCoord& coord) {
  const int first = p * PAIR, last = first + PAIR - 1;
  const bool valid[2] = {PADDED == D || coord.unit(0) < D, PADDED == D || coord.unit(PAIR - 1) < D};
  auto number = [&](int i, int q) { return valid[q % PAIR] ? values[i][q] : 0; };
  UNROLL for (int i = 0; i < 4 * Part::VECTORS; i++) part.words[i] = 0;
  UNROLL for (int i = 0; i < SUMS; i++) part.words[i] = number(i, first) + (PAIR == 2 ? number(i, last) : 0);
  UNROLL for (int i = 0; i < MOMENTS; i++) {
    const float shift = __shfl_sync(~0u, number(SUMS + i, first), coord.lane_in_quad % (32 / SEQUENCE_LANES));
    const float a = valid[0] ? values[SUMS + i][first] - shift : 0;
    const float b = PAIR == 2 && valid[1] ? values[SUMS + i][last] - shift : 0;
    part.words[SUMS + 2 * i] = a + b, part.words[SUMS + 2 * i + 1] = fmaf(a, a, b * b);
    part.words[Part::ADDED + i] = shift;
  }
  UNROLL for (int i = 0; i < MAXIMA; i++) {
    float largest = valid[0] ? values[SUMS + MOMENTS + i][first] : -INFINITY;
    if (PAIR == 2 && valid[1]) largest = op_max(largest, values[SUMS + MOMENTS + i][last]);
    part.words[Part::ADDED + MOMENTS + i] = largest;
  }
  part.template add_lanes<32 / SEQUENCE_LANES>();
}
