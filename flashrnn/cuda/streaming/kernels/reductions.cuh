// Reductions over the units of a head within a step. Each block of a launch has one item, whose cells stay in registers
// between phases: a block with several items would wait for itself.
//
// One thread per sequence adds up the contributions of the block's units. These parts of all blocks of the group are
// exchanged through global memory: once the group's second counter shows that they have arrived, one warp per sequence
// adds them up.
#pragma once
#include "kernels/partial.cuh"
#include "streaming/kernels/stream.cuh"

constexpr int REDUCTION_COUNTER = 16;  // offset of the second counter, in the cache line of the first

// The reductions of an item.
struct UnitReductions {
  float* numbers;   // [value][SEQS][UNITS], in shared memory
  float* results;   // [result][SEQS]
  uint4* parts;     // of the group: [EXCHANGES][SEQS][UNIT_BLOCKS][EXCHANGED_VECTORS], in global memory
  u32* counter;
  u32 step = 0;
  const Item& item;
  i64 B;
  DEVICE UnitReductions(float* memory, const Params& params, const Item& item)
      : numbers(memory), results(memory + PART_FLOATS * SEQS * UNITS),
        parts(params.parts + item.counter / 32 * i64(EXCHANGES * SEQS * UNIT_BLOCKS * EXCHANGED_VECTORS)),
        counter(params.counters + item.counter + REDUCTION_COUNTER), item(item), B(params.B) {}
  DEVICE bool has_sequence(int sequence) const { return item.sequence0 + sequence < B; }
  DEVICE static int units_of(int block) { return min(UNITS, D - block * UNITS); }
  // Returns the address of a block's part of a sequence, in exchange `number`.
  DEVICE uint4* part(int number, int sequence, int block) const {
    return parts + ((number * SEQS + sequence) * UNIT_BLOCKS + block) * EXCHANGED_VECTORS;
  }

  // Reduces SUMS values, then MOMENTS, then MAXIMA over the units of the head. The results are the sums, mean and
  // variance of each moment, then the maxima. NUMBER: of the exchange in the step. All threads of the group call this
  // together.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      UNROLL for (int k = 0; k < SUMS + MOMENTS + MAXIMA; k++)
        numbers[(k * SEQS + cell.column) * UNITS + cell.row] = values[k][i];
    });
    __syncthreads();
    for (int sequence = threadIdx.x; sequence < SEQS && has_sequence(sequence); sequence += THREADS)
      publish<Part>(NUMBER, sequence);
    __syncthreads();
    if (threadIdx.x == 0) signal(counter), await(counter, (step * EXCHANGES + NUMBER + 1) * UNIT_BLOCKS);
    __syncthreads();
    for (int sequence = threadIdx.x / 32; sequence < SEQS && has_sequence(sequence); sequence += WARPS)
      add_up<Part>(NUMBER, sequence);
    __syncthreads();
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      UNROLL for (int k = 0; k < Part::RESULTS; k++) result[k][i] = results[k * SEQS + cell.column];
    });
  }

  // Stores the block's part of a sequence, in one thread.
  template <class Part>
  DEVICE void publish(int number, int sequence) const {
    auto of_unit = [&](int k, int unit) { return numbers[(k * SEQS + sequence) * UNITS + unit]; };
    Part total = {};
    UNROLL for (int i = 0; i < Part::SUMS; i++) total.words[i] = of_unit(i, 0);
    UNROLL for (int i = 0; i < Part::MOMENTS + Part::MAXIMA; i++)
      total.words[Part::ADDED + i] = of_unit(Part::SUMS + i, 0);
    for (int unit = 1; unit < units_of(item.unit0 / UNITS); unit++) {
      UNROLL for (int i = 0; i < Part::SUMS; i++) total.words[i] += of_unit(i, unit);
      UNROLL for (int i = 0; i < Part::MOMENTS; i++) {
        const float deviation = of_unit(Part::SUMS + i, unit) - total.words[Part::ADDED + i];
        total.words[Part::SUMS + 2 * i] += deviation;
        total.words[Part::SUMS + 2 * i + 1] = fmaf(deviation, deviation, total.words[Part::SUMS + 2 * i + 1]);
      }
      UNROLL for (int i = Part::ADDED + Part::MOMENTS; i < Part::WORDS; i++)
        total.words[i] = op_max(total.words[i], of_unit(i - Part::ADDED + Part::SUMS, unit));
    }
    UNROLL for (int v = 0; v < Part::VECTORS; v++) {
      const float* four = total.words + 4 * v;
      part(number, sequence, item.unit0 / UNITS)[v] =
          make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]),
                     __float_as_uint(four[3]));
    }
  }

  // Adds up the parts of a sequence, in one warp, and stores the results in shared memory.
  template <class Part>
  DEVICE void add_up(int number, int sequence) const {
    const int lane = threadIdx.x % 32;
    Part total, other;
    float units = 0;
    UNROLL for (int i = 0; i < Part::WORDS; i++) total.words[i] = i < Part::ADDED + Part::MOMENTS ? 0 : -INFINITY;
    for (int block = lane; block < UNIT_BLOCKS; block += 32) {
      UNROLL for (int v = 0; v < Part::VECTORS; v++) {
        const uint4 four = load_exchanged(part(number, sequence, block) + v, true);
        other.words[4 * v] = __uint_as_float(four.x), other.words[4 * v + 1] = __uint_as_float(four.y);
        other.words[4 * v + 2] = __uint_as_float(four.z), other.words[4 * v + 3] = __uint_as_float(four.w);
      }
      const float more = units_of(block);
      if (block < 32) total = other;
      else total.add(other, more);
      units += more;
    }
    total.add_lanes(units);
    if (lane == 0)
      UNROLL for (int i = 0; i < Part::RESULTS; i++) results[i * SEQS + sequence] = total.result(i);
  }
};

// The statistics of a head follow its gates in a row. With a head of odd size, their addresses are multiples of two
// bytes only.
DEVICE void store_statistic(gate* row, int k, float x) {
  gate* to = row + D * STORED + k * (4 / sizeof(gate));
  if constexpr (sizeof(gate) == 4) {
    *reinterpret_cast<float*>(to) = x;
  } else {
    const u32 word = __float_as_uint(x);
    reinterpret_cast<u16*>(to)[0] = static_cast<u16>(word),
        reinterpret_cast<u16*>(to)[1] = static_cast<u16>(word >> 16);
  }
}
DEVICE float load_statistic(const gate* row, int k) {
  const gate* from = row + D * STORED + k * (4 / sizeof(gate));
  if constexpr (sizeof(gate) == 4) return *reinterpret_cast<const float*>(from);
  else return __uint_as_float(reinterpret_cast<const u16*>(from)[0] | u32(reinterpret_cast<const u16*>(from)[1]) << 16);
}
