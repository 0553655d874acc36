// Reductions over the units of a head within a step, for cells whose step calls flashrnn.layer_norm or similar
// functions.
//
// IN_ROWS, a row of lanes has all units of a sequence (row_reductions.cuh). In a cluster, every warp sends its part to
// all blocks (cluster_reductions.cuh); in a grid, it publishes its part in global memory (grid_reductions.cuh).
// Otherwise, a warp reduces its units by shuffles and stores a Partial for each sequence in shared memory. If a block
// has few warps, every thread adds up the parts of its own sequences. If it has many, one thread per sequence does, and
// all threads read the results from shared memory.
//
// A step has EXCHANGES exchanges. Between blocks, each exchange has its own buffer, or two if there is only one:
// another exchange lies between two uses of a buffer, so all warps have read it before it is overwritten. In one block,
// there are two buffers of parts: all threads synchronise between an exchange and the next but one.
//
// EARLY_SUMS (backward of several blocks, cells/early_sums.py): exchange 0 begins before the step has received dh, and
// ends after exchange 1 has begun. It has two buffers, because a block that begins it does not know whether others have
// read that of the step before. The block then receives dh from all others, which they send after they have read both
// exchanges of the step before.
#pragma once
#include "kernels/partial.cuh"
#include "resident/kernels/cells.cuh"

#if REDUCES
#include "resident/kernels/cluster_reductions.cuh"
#include "resident/kernels/grid_reductions.cuh"
#include "resident/kernels/row_reductions.cuh"

constexpr int PARTIAL_ROW = CONTRIBUTIONS * 4 * EXCHANGED_VECTORS + 4;  // floats of a sequence; avoids bank conflicts
constexpr int PARTIAL_BUFFERS = 2, PARTIAL_BYTES = SEQS * PARTIAL_ROW * 4;
constexpr bool ADDED_BY_ALL = CONTRIBUTIONS <= 4;
constexpr int RESULT_BYTES = SEQS * 4 * EXCHANGED_VECTORS * 4;
constexpr int REDUCTION_BYTES = IN_ROWS     ? CENTRED * SquareSums::SIZE
                                : CLUSTERED ? ClusterReductions::SHARED
                                : GRID      ? GridReductions::SHARED
                                            : PARTIAL_BUFFERS * PARTIAL_BYTES + RESULT_BYTES;

// Returns how many of `count` units from `first` on are units of the head, not padding.
DEVICE int real_units(int first, int count) { return PADDED == D ? count : max(min(D - first, count), 0); }

// Reduce-scatter over the eight lanes with the same lane_in_quad: afterwards, values[i] is the total of value number
// 8i + owned_value(lane).
template <int COUNT>
DEVICE void reduce_scatter_lanes(float (&values)[COUNT], int lane) {
  int left = COUNT;
  UNROLL for (int mask = 16; mask >= 4; mask /= 2) {
    const bool odd = lane & mask;
    UNROLL for (int i = 0; 2 * i < left; i++) {
      const float first = values[2 * i], second = 2 * i + 1 < left ? values[2 * i + 1] : 0;
      values[i] = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, mask);
    }
    left = (left + 1) / 2;
  }
}
DEVICE int owned_value(int lane) { return (lane >> 4 & 1) + (lane >> 3 & 1) * 2 + (lane >> 2 & 1) * 4; }

struct UnitReductions {
  char* memory;
  float* partials;
  float* results;      // [number][SEQS]
  float* own_partial;  // where the lane stores its total of reduce_scatter_lanes
  float* own_result;   // of its first sequence
  u64* published;      // in a grid: words of the group
  int step;
  const ThreadCoord& coord;
  // `words`: in a grid, the end of the words of all groups' GridBarrier.
  DEVICE UnitReductions(char* memory, u64* words, const ThreadCoord& coord)
      : memory(memory), published(cache_line(words) + blockIdx.x / BLOCKS * GridReductions::WORDS), step(0),
        coord(coord) {
    partials = reinterpret_cast<float*>(memory);
    results = reinterpret_cast<float*>(memory + PARTIAL_BUFFERS * PARTIAL_BYTES);
    own_partial = place(owned_value(coord.lane) % PAIRS, owned_value(coord.lane) / PAIRS);
    own_result = results + coord.sequence(0);
  }
  DEVICE ClusterReductions in_cluster() const { return ClusterReductions{memory, coord}; }
  DEVICE void init() const {
    if (CLUSTERED) in_cluster().init();
  }
  DEVICE GridReductions in_grid() const { return GridReductions{reinterpret_cast<float*>(memory), published, coord}; }
  // Clears the words that this block publishes; before the grid barrier.
  DEVICE void clear() const {
    if (GRID) in_grid().clear();
  }
  DEVICE int buffer(int number) const {
    return EARLY_SUMS ? (number ? 2 : step & 1) : EXCHANGES > 1 ? number : step & 1;
  }
  // Returns the offset of the parts of an exchange.
  static DEVICE constexpr int parts_of(int number) { return number % PARTIAL_BUFFERS * (PARTIAL_BYTES / 4); }
  DEVICE u32 phase(int number) const { return EXCHANGES > 1 && (number || !EARLY_SUMS) ? step & 1 : step >> 1 & 1; }

  // Reduces SUMS values, then MOMENTS, then MAXIMA over the units of the head, for each of the lane's sequences. The
  // results are the sums, mean and variance of each moment, then the maxima. NUMBER: of the exchange in the step. All
  // threads of the group call this together.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const;
  // The same in two parts, between blocks.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void begin(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS]) const {
    if constexpr (GRID) in_grid().begin<SUMS, MOMENTS, MAXIMA>(buffer(NUMBER), phase(NUMBER), values);
    else in_cluster().begin<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer(NUMBER), values);
  }
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void end(float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    if constexpr (GRID) in_grid().end<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer(NUMBER), phase(NUMBER), result);
    else in_cluster().end<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer(NUMBER), phase(NUMBER), result);
  }

 private:
  DEVICE bool is_unit(int q) const { return coord.has_cells() && (PADDED == D || coord.unit(q) < D); }
  // Returns the address of a word of the warp's part, for the lane's pair p.
  DEVICE float* place(int p, int word) const {
    return partials + coord.sequence(p * PAIR) * PARTIAL_ROW + coord.contribution() * 4 * EXCHANGED_VECTORS + word;
  }

  // Reduces the units of the warp, and stores its part in shared memory.
  template <class Part, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce_warp(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS], int parts) const;
  // Adds up the parts of a sequence that the warps of the block have stored. The block must have synchronised.
  template <class Part>
  DEVICE void total_of_block(Part& total, int sequence, int parts) const;
  // Stores the results of a sequence for all threads.
  template <class Part>
  DEVICE void store_results(const Part& total, int sequence) const;
};

// The reductions of a step in a cluster, with a function that is called during the first exchange.
template <class Meanwhile>
struct ReductionsAnd {
  const UnitReductions& units;
  const Meanwhile& meanwhile;
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    units.begin<NUMBER, SUMS, MOMENTS, MAXIMA>(values);
    if constexpr (NUMBER == 0) __syncwarp(), meanwhile();  // the compiler would delay what is sent
    units.end<NUMBER, SUMS, MOMENTS, MAXIMA>(result);
  }
};

template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
DEVICE void UnitReductions::reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                                   float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
  using Part = Partial<SUMS, MOMENTS, MAXIMA>;
  if constexpr (IN_ROWS) return RowReductions().reduce<NUMBER, SUMS, MOMENTS, MAXIMA>(values, result);
  if constexpr (CLUSTERED)
    return in_cluster().reduce<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer(NUMBER), phase(NUMBER), values, result);
  if constexpr (GRID)
    return in_grid().reduce<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer(NUMBER), phase(NUMBER), values, result);
  constexpr int FIRST = parts_of(NUMBER);
  reduce_warp<Part, SUMS, MOMENTS, MAXIMA>(values, FIRST);
  __syncthreads();
  if constexpr (ADDED_BY_ALL) {
    UNROLL for (int p = 0; p < PAIRS; p++) {
      Part total;
      total_of_block(total, coord.sequence(p * PAIR), FIRST);
      UNROLL for (int i = 0; i < Part::RESULTS; i++)
        UNROLL for (int q = p * PAIR; q < p * PAIR + PAIR; q++) result[i][q] = total.result(i);
    }
    return;
  }
  if (threadIdx.x < SEQS) {
    Part total;
    total_of_block(total, threadIdx.x, FIRST);
    store_results(total, threadIdx.x);
  }
  __syncthreads();
  UNROLL for (int i = 0; i < Part::RESULTS; i++)
    UNROLL for (int q = 0; q < CELLS; q++) result[i][q] = own_result[i * SEQS + tile_of(q) * 8 + second_of(q)];
}

template <class Part, int SUMS, int MOMENTS, int MAXIMA>
DEVICE void UnitReductions::reduce_warp(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS], int parts) const {
  float added[Part::ADDED > 0 ? Part::ADDED * PAIRS : 1], shifts[MOMENTS + 1][PAIRS], maxima[MAXIMA + 1][PAIRS];
  const bool valid[2] = {is_unit(0), is_unit(PAIR - 1)};
  auto number = [&](int i, int q) { return valid[q % PAIR] ? values[i][q] : 0; };
  UNROLL for (int p = 0; p < PAIRS; p++) {
    const int first = p * PAIR, last = first + PAIR - 1;
    UNROLL for (int i = 0; i < SUMS; i++) added[i * PAIRS + p] = number(i, first) + (PAIR == 2 ? number(i, last) : 0);
    UNROLL for (int i = 0; i < MOMENTS; i++) {
      shifts[i][p] = __shfl_sync(~0u, number(SUMS + i, first), coord.lane_in_quad);
      const float a = valid[0] ? values[SUMS + i][first] - shifts[i][p] : 0;
      const float b = PAIR == 2 && valid[1] ? values[SUMS + i][last] - shifts[i][p] : 0;
      added[(SUMS + 2 * i) * PAIRS + p] = a + b, added[(SUMS + 2 * i + 1) * PAIRS + p] = fmaf(a, a, b * b);
    }
    UNROLL for (int i = 0; i < MAXIMA; i++) {
      float largest = valid[0] ? values[SUMS + MOMENTS + i][first] : -INFINITY;
      if (PAIR == 2 && valid[1]) largest = op_max(largest, values[SUMS + MOMENTS + i][last]);
      UNROLL for (int mask = 16; mask >= 4; mask /= 2) largest = op_max(largest, __shfl_xor_sync(~0u, largest, mask));
      maxima[i][p] = largest;
    }
  }
  if constexpr (Part::ADDED > 0) reduce_scatter_lanes(added, coord.lane);
  if (!coord.has_cells()) return;
  UNROLL for (int i = 0; 8 * i < Part::ADDED * PAIRS; i++)
    if (8 * i + owned_value(coord.lane) < Part::ADDED * PAIRS) own_partial[parts + 8 * i / PAIRS] = added[i];
  if (coord.quad > 0) return;
  UNROLL for (int p = 0; p < PAIRS; p++) {
    UNROLL for (int i = 0; i < MOMENTS; i++) *place(p, parts + Part::ADDED + i) = shifts[i][p];
    UNROLL for (int i = 0; i < MAXIMA; i++) *place(p, parts + Part::ADDED + MOMENTS + i) = maxima[i][p];
  }
}

template <class Part>
DEVICE void UnitReductions::total_of_block(Part& total, int sequence, int parts) const {
  const float* row = partials + parts + sequence * PARTIAL_ROW;
  total.load(row);
  UNROLL for (int i = 1; i < CONTRIBUTIONS; i++) {
    Part other;
    other.load(row + i * 4 * EXCHANGED_VECTORS);
    total.add(other, real_units(coord.rank * UNITS + i / HOLDERS * 16, 16) / float(HOLDERS));
  }
}

template <class Part>
DEVICE void UnitReductions::store_results(const Part& total, int sequence) const {
  UNROLL for (int i = 0; i < Part::RESULTS; i++) results[i * SEQS + sequence] = total.result(i);
}
#else
constexpr int REDUCTION_BYTES = 0;
struct UnitReductions {
  int step = 0;
  DEVICE UnitReductions(char*, u64*, const ThreadCoord&) {}
  DEVICE void init() const {}
  DEVICE void clear() const {}
};
#endif
