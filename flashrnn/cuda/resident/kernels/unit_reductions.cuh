// Reductions over the units of a head within a step, for cells whose step calls flashrnn.layer_norm and the like.
//
// IN_ROWS, a row of lanes has all units of a sequence, and reduces by shuffles. Otherwise, a warp reduces its units by shuffles, and leaves a Partial for each sequence in shared memory. In one block of few warps every
// thread adds up those of its sequences; in one of many, a thread per sequence does. In a cluster, a thread per sequence and block of the cluster adds up the block's and sends the sum there;
// a warp per four sequences adds up what all blocks have sent. With GRID, they are published in global memory, and a warp per
// sequence adds them up. The results are then read from shared memory by all.
//
// A step has EXCHANGES exchanges. Between blocks, each has a buffer of its own, and a single one has two: so a buffer is written
// again when everybody has read it, because there is another exchange in between. In one block, parts have two buffers: between
// an exchange and the one after the next, or the next step, all threads meet.
#pragma once
#include "kernels/partial.cuh"
#include "resident/kernels/cells.cuh"

#if REDUCES
// Reduces over the two units of a lane and those of the other lanes of its row: sums, then moments (mean and variance), then
// maxima. IN_ROWS, every step's reductions are of this kind.
struct RowReductions {
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&of)[SUMS + MOMENTS + MAXIMA][CELLS], float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    constexpr int MAXIMA_FROM = SUMS + 2 * MOMENTS;
    float all[SUMS + 2 * MOMENTS + MAXIMA][PAIRS];  // of a moment: the sum, and that of the squared deviations from the mean
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) all[i][p] = of[i][2 * p] + of[i][2 * p + 1];
#pragma unroll
      for (int i = 0; i < MOMENTS; i++) {
        const float a = of[SUMS + i][2 * p], b = of[SUMS + i][2 * p + 1];
        all[SUMS + 2 * i][p] = a + b, all[SUMS + 2 * i + 1][p] = (a - b) * (a - b) * 0.5f;
      }
#pragma unroll
      for (int i = 0; i < MAXIMA; i++) all[MAXIMA_FROM + i][p] = op_max(of[SUMS + MOMENTS + i][2 * p], of[SUMS + MOMENTS + i][2 * p + 1]);
    }
#pragma unroll
    for (int mask = 1; mask < ROW_LANES; mask *= 2)
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        auto other = [&](int i) { return __shfl_xor_sync(~0u, all[i][p], mask); };
#pragma unroll
        for (int i = 0; i < SUMS; i++) all[i][p] += other(i);
#pragma unroll
        for (int i = SUMS; i < MAXIMA_FROM; i += 2) {  // of 2 * mask units each (Chan et al., 1979)
          const float sum = other(i), squares = other(i + 1), apart = all[i][p] - sum;
          all[i][p] += sum, all[i + 1][p] = fmaf(apart * apart, 1.0f / (4 * mask), all[i + 1][p] + squares);
        }
#pragma unroll
        for (int i = MAXIMA_FROM; i < MAXIMA_FROM + MAXIMA; i++) all[i][p] = op_max(all[i][p], other(i));
      }
#pragma unroll
    for (int i = 0; i < SUMS + 2 * MOMENTS + MAXIMA; i++)
#pragma unroll
      for (int q = 0; q < CELLS; q++) result[i][q] = all[i][q / 2] * (i >= SUMS && i < MAXIMA_FROM ? 1.0f / D : 1.0f);
  }
};

constexpr int HOLDERS = CELLS == 1 ? 2 : 1;          // warps of a unit tile that hold the same sequence's units
constexpr int CONTRIBUTIONS = UNIT_TILES * HOLDERS;  // of a block, to every sequence
constexpr int EXCHANGE_BUFFERS = EXCHANGES > 1 ? EXCHANGES : 2;
constexpr int PARTIAL_ROW = CONTRIBUTIONS * 4 * EXCHANGED_VECTORS + 4;  // floats of a sequence, in other banks than the next one's
constexpr int PARTIAL_BUFFERS = BLOCKS == 1 ? 2 : 1, PARTIAL_BYTES = SEQS * PARTIAL_ROW * 4;
constexpr bool ADDED_BY_ALL = BLOCKS == 1 && CONTRIBUTIONS <= 4;
constexpr int RECEIVED_ROW = BLOCKS * 4 * EXCHANGED_VECTORS + 4;
constexpr int RECEIVED_BYTES = CLUSTERED ? EXCHANGE_BUFFERS * SEQS * RECEIVED_ROW * 4 : 0;
constexpr int RESULT_BYTES = SEQS * 4 * EXCHANGED_VECTORS * 4;
constexpr i64 PUBLISHED_WORDS = i64(EXCHANGE_BUFFERS) * SEQS * BLOCKS * EXCHANGED_PAIRS;  // of a group, in global memory
constexpr int REDUCTION_BYTES = IN_ROWS ? 0 : PARTIAL_BUFFERS * PARTIAL_BYTES + RECEIVED_BYTES + RESULT_BYTES + (CLUSTERED ? (EXCHANGE_BUFFERS * 8 + 15) / 16 * 16 : 0);

// Return how many of `count` units from `first` on are units of the head.
DEVICE int real_units(int first, int count) { return PADDED == D ? count : max(min(D - first, count), 0); }

// Adds up the values of the eight lanes with the same lane_in_quad. The lane has the total of value 8 i + owned_value in values[i].
template <int COUNT>
DEVICE void reduce_scatter_lanes(float (&values)[COUNT], int lane) {
  int left = COUNT;
#pragma unroll
  for (int mask = 16; mask >= 4; mask /= 2) {
    const bool odd = lane & mask;
#pragma unroll
    for (int i = 0; 2 * i < left; i++) {
      const float first = values[2 * i], second = 2 * i + 1 < left ? values[2 * i + 1] : 0;
      values[i] = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, mask);
    }
    left = (left + 1) / 2;
  }
}
DEVICE int owned_value(int lane) { return (lane >> 4 & 1) + (lane >> 3 & 1) * 2 + (lane >> 2 & 1) * 4; }

struct UnitReductions {
  float *partials, *received;
  float* results;      // [number][SEQS]
  float* own_partial;  // where the lane's total of reduce_scatter_lanes goes
  float* own_result;   // of its first sequence
  u32 barriers;    // one for each buffer
  u64* published;  // [buffer][sequence][block][EXCHANGED_PAIRS]
  int step;
  const ThreadCoord& coord;
  // `words`: after the words of all groups' GridBarrier.
  DEVICE UnitReductions(char* memory, u64* words, const ThreadCoord& coord)
      : published(words + blockIdx.x / BLOCKS * PUBLISHED_WORDS), step(0), coord(coord) {
    partials = reinterpret_cast<float*>(memory);
    received = reinterpret_cast<float*>(memory + PARTIAL_BUFFERS * PARTIAL_BYTES);
    results = reinterpret_cast<float*>(memory + PARTIAL_BUFFERS * PARTIAL_BYTES + RECEIVED_BYTES);
    own_partial = place(owned_value(coord.lane) % PAIRS, owned_value(coord.lane) / PAIRS);
    own_result = results + coord.sequence(0);
    if (CLUSTERED) barriers = shared_address(memory + PARTIAL_BUFFERS * PARTIAL_BYTES + RECEIVED_BYTES + RESULT_BYTES);
  }
  DEVICE void init() const {
    if (CLUSTERED && threadIdx.x == 0)
      for (int i = 0; i < EXCHANGE_BUFFERS; i++) barrier_init(barriers + i * 8);
  }
  // Clears what this block publishes, before the blocks of a grid meet.
  DEVICE void clear() const {
    for (int i = threadIdx.x; i < EXCHANGE_BUFFERS * SEQS * EXCHANGED_PAIRS; i += THREADS)
      publish_phase(published + (i / EXCHANGED_PAIRS * BLOCKS + coord.rank) * EXCHANGED_PAIRS + i % EXCHANGED_PAIRS, {}, 0);
  }
  DEVICE int buffer(int number) const { return EXCHANGES > 1 ? number : step & 1; }
  DEVICE u32 phase() const { return EXCHANGES > 1 ? step & 1 : step >> 1 & 1; }

  // Reduces SUMS numbers, then MOMENTS, then MAXIMA over the units of the head; `number`: of the exchange in the step. All threads
  // of the group call this together.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&of)[SUMS + MOMENTS + MAXIMA][CELLS], float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    if constexpr (IN_ROWS) return RowReductions().reduce<NUMBER, SUMS, MOMENTS, MAXIMA>(of, result);
    constexpr int BUFFER = NUMBER % PARTIAL_BUFFERS * (PARTIAL_BYTES / 4);
    if (has_cells()) reduce_warp<Part, SUMS, MOMENTS, MAXIMA, BUFFER>(of);
    exchange<Part, NUMBER>();
    if constexpr (ADDED_BY_ALL) {
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        Part total;
        total_of_block(total, coord.sequence(p * PAIR), BUFFER);
#pragma unroll
        for (int i = 0; i < Part::RESULTS; i++)
#pragma unroll
          for (int q = p * PAIR; q < p * PAIR + PAIR; q++) result[i][q] = total.result(i);
      }
      return;
    }
    if (!has_cells()) return;
#pragma unroll
    for (int i = 0; i < Part::RESULTS; i++)
#pragma unroll
      for (int q = 0; q < CELLS; q++) result[i][q] = own_result[i * SEQS + tile_of(q) * 8 + second_of(q)];
  }
  DEVICE bool has_cells() const { return coord.has_cells(); }

  // Reduces the parts of all warps to `results`, unless all threads add up the block's parts themselves.
  template <class Part, int NUMBER>
  DEVICE void exchange() const {
    if (CLUSTERED && threadIdx.x == 0) barrier_expect(barriers + buffer(NUMBER) * 8, SEQUENCES * BLOCKS * Part::VECTORS * 16);
    __syncthreads();
    if constexpr (ADDED_BY_ALL) return;
    if constexpr (CLUSTERED) {
      send_partials<Part>(NUMBER);
      total_received<Part>(NUMBER);
    } else if constexpr (GRID) {
      publish<Part>(NUMBER);
      total_published<Part>(NUMBER);
    } else {
      if (threadIdx.x < SEQS) {
        Part total;
        total_of_block(total, threadIdx.x, NUMBER % PARTIAL_BUFFERS * (PARTIAL_BYTES / 4));
        store_results(total, threadIdx.x);
      }
    }
    __syncthreads();
  }
  // Return where the warp's word goes for the lane's pair p.
  DEVICE float* place(int p, int word) const {
    const int contribution = coord.unit_tile * HOLDERS + (HOLDERS == 2 ? coord.cell_slice % 2 : 0);
    return partials + coord.sequence(p * PAIR) * PARTIAL_ROW + contribution * 4 * EXCHANGED_VECTORS + word;
  }

  template <class Part, int SUMS, int MOMENTS, int MAXIMA, int BUFFER>
  DEVICE void reduce_warp(const float (&of)[SUMS + MOMENTS + MAXIMA][CELLS]) const {
    float added[Part::ADDED > 0 ? Part::ADDED * PAIRS : 1], shifts[MOMENTS + 1][PAIRS], maxima[MAXIMA + 1][PAIRS];
    const bool valid[2] = {is_unit(0), is_unit(PAIR - 1)};
    auto number = [&](int i, int q) { return valid[q % PAIR] ? of[i][q] : 0; };
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int first = p * PAIR, last = first + PAIR - 1;
#pragma unroll
      for (int i = 0; i < SUMS; i++) added[i * PAIRS + p] = number(i, first) + (PAIR == 2 ? number(i, last) : 0);
#pragma unroll
      for (int i = 0; i < MOMENTS; i++) {
        shifts[i][p] = __shfl_sync(~0u, number(SUMS + i, first), coord.lane_in_quad);
        const float a = valid[0] ? of[SUMS + i][first] - shifts[i][p] : 0, b = PAIR == 2 && valid[1] ? of[SUMS + i][last] - shifts[i][p] : 0;
        added[(SUMS + 2 * i) * PAIRS + p] = a + b, added[(SUMS + 2 * i + 1) * PAIRS + p] = fmaf(a, a, b * b);
      }
#pragma unroll
      for (int i = 0; i < MAXIMA; i++) {
        float largest = valid[0] ? of[SUMS + MOMENTS + i][first] : -INFINITY;
        if (PAIR == 2 && valid[1]) largest = op_max(largest, of[SUMS + MOMENTS + i][last]);
#pragma unroll
        for (int mask = 16; mask >= 4; mask /= 2) largest = op_max(largest, __shfl_xor_sync(~0u, largest, mask));
        maxima[i][p] = largest;
      }
    }
    if constexpr (Part::ADDED > 0) reduce_scatter_lanes(added, coord.lane);
#pragma unroll
    for (int i = 0; 8 * i < Part::ADDED * PAIRS; i++)
      if (8 * i + owned_value(coord.lane) < Part::ADDED * PAIRS) own_partial[BUFFER + 8 * i / PAIRS] = added[i];
    if (coord.quad > 0) return;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
#pragma unroll
      for (int i = 0; i < MOMENTS; i++) *place(p, BUFFER + Part::ADDED + i) = shifts[i][p];
#pragma unroll
      for (int i = 0; i < MAXIMA; i++) *place(p, BUFFER + Part::ADDED + MOMENTS + i) = maxima[i][p];
    }
  }
  DEVICE bool is_unit(int q) const { return PADDED == D || coord.unit(q) < D; }

  // Adds up what the block's units contribute to a sequence.
  template <class Part>
  DEVICE void total_of_block(Part& total, int sequence, int buffer) const {
    const float* row = partials + buffer + sequence * PARTIAL_ROW;
    total.load(row);
#pragma unroll
    for (int i = 1; i < CONTRIBUTIONS; i++) {
      Part other;
      other.load(row + i * 4 * EXCHANGED_VECTORS);
      total.add(other, real_units(coord.rank * UNITS + i / HOLDERS * 16, 16) / float(HOLDERS));
    }
  }

  template <class Part>
  DEVICE void store_results(const Part& total, int sequence) const {
#pragma unroll
    for (int i = 0; i < Part::RESULTS; i++) results[i * SEQS + sequence] = total.result(i);
  }

  template <class Part>
  DEVICE void send_partials(int number) const {
    const u32 to = shared_address(received) + buffer(number) * SEQS * RECEIVED_ROW * 4, barrier = barriers + buffer(number) * 8;
    for (int i = threadIdx.x; i < SEQUENCES * BLOCKS; i += THREADS) {
      const int sequence = i % SEQUENCES, rank = (coord.rank + i / SEQUENCES) % BLOCKS;
      Part total;
      total_of_block(total, sequence, 0);
      const u32 place = remote_address(to + (sequence * RECEIVED_ROW + coord.rank * 4 * Part::VECTORS) * 4, rank);
#pragma unroll
      for (int k = 0; k < Part::VECTORS; k++) {
        const float* four = total.words + 4 * k;
        send(place + 16 * k, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]), __float_as_uint(four[3])),
             remote_address(barrier, rank));
      }
    }
  }

  // Adds up what the blocks have sent: a warp for four sequences, the eight lanes of each for every eighth block.
  template <class Part>
  DEVICE void total_received(int number) const {
    barrier_wait(barriers + buffer(number) * 8, phase());
    const float* rows = received + buffer(number) * SEQS * RECEIVED_ROW;
    for (int first = coord.warp * 4; first < SEQUENCES; first += WARPS * 4) {
      const int sequence = min(first + coord.lane_in_quad, SEQUENCES - 1);
      const float* row = rows + sequence * RECEIVED_ROW;
      Part total, other;
      total.load(row);
#pragma unroll
      for (int i = 0; i < Part::ADDED; i++) total.words[i] = coord.quad == 0 ? total.words[i] : 0;
#pragma unroll
      for (int i = 0; i < BLOCKS; i += 8) {
        const int rank = i + coord.quad;
        if (rank == 0 || rank >= BLOCKS) continue;
        other.load(row + rank * 4 * Part::VECTORS);
        total.add(other, real_units(rank * UNITS, UNITS));
      }
#pragma unroll
      for (int mask = 16; mask >= 4; mask /= 2) {
#pragma unroll
        for (int i = 0; i < Part::ADDED; i++) total.words[i] += __shfl_xor_sync(~0u, total.words[i], mask);
#pragma unroll
        for (int i = Part::ADDED + Part::MOMENTS; i < Part::WORDS; i++)
          total.words[i] = op_max(total.words[i], __shfl_xor_sync(~0u, total.words[i], mask));
      }
      if (coord.quad == 0 && first + coord.lane_in_quad < SEQUENCES) store_results(total, sequence);
    }
  }

  DEVICE u64* published_by(int number, int sequence, int rank) const {
    return published + ((buffer(number) * SEQS + sequence) * BLOCKS + rank) * EXCHANGED_PAIRS;
  }
  // Publishes the block's part. The lowest bit of a pair's first word is lost: shifts and maxima, the last words, are second ones.
  template <class Part>
  DEVICE void publish(int number) const {
    if (threadIdx.x >= SEQS) return;
    Part total;
    total_of_block(total, threadIdx.x, 0);
    u64* to = published_by(number, threadIdx.x, coord.rank);
    auto word = [&](int i) { return i < 0 ? 0 : __float_as_uint(total.words[i < 0 ? 0 : i]); };
#pragma unroll
    for (int i = 0; i < Part::PAIRS; i++)
      publish_phase(to + i, make_uint2(word(i + Part::WORDS - 2 * Part::PAIRS), word(i + Part::WORDS - Part::PAIRS)), phase() ^ 1);
  }

  // Adds up what the blocks have published: a warp for a sequence, its lanes for every 32nd block.
  template <class Part>
  DEVICE void total_published(int number) const {
    for (int sequence = coord.warp; sequence < SEQS; sequence += WARPS) {
      Part total, other;
      float units = 0;
#pragma unroll
      for (int i = 0; i < Part::WORDS; i++) total.words[i] = i < Part::ADDED + Part::MOMENTS ? 0 : -INFINITY;
      for (int rank = coord.lane; rank < BLOCKS; rank += 32) {
        peek_partial(other, published_by(number, sequence, rank));
        const float more = real_units(rank * UNITS, UNITS);
        if (rank < 32) total = other;
        else total.add(other, more);
        units += more;
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
        for (int i = 0; i < Part::WORDS; i++) other.words[i] = __shfl_xor_sync(~0u, total.words[i], mask);
        const float more = __shfl_xor_sync(~0u, units, mask);
        total.add(other, more);
        units += more;
      }
      if (coord.lane == 0) store_results(total, sequence);
    }
  }
  template <class Part>
  DEVICE void peek_partial(Part& part, const u64* from) const {
    uint2 pairs[Part::PAIRS];
    bool all = false;
    while (!all) {
      all = true;
#pragma unroll
      for (int i = 0; i < Part::PAIRS; i++) peek_phase(pairs[i], from + i);
#pragma unroll
      for (int i = 0; i < Part::PAIRS; i++) all &= in_phase(pairs[i], phase() ^ 1);
    }
#pragma unroll
    for (int i = 0; i < Part::WORDS; i++) {
      const int at = i + 2 * Part::PAIRS - Part::WORDS;
      part.words[i] = __uint_as_float(at < Part::PAIRS ? pairs[at].x : pairs[at - Part::PAIRS].y);
    }
  }
};
#else
constexpr int REDUCTION_BYTES = 0;
struct UnitReductions {
  int step = 0;
  DEVICE UnitReductions(char*, u64*, const ThreadCoord&) {}
  DEVICE void init() const {}
  DEVICE void clear() const {}
};
#endif
