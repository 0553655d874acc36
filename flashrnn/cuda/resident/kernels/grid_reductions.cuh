// Reductions over the units of a head within a step, between the blocks of a grid.
//
// Every warp reduces its units by shuffles and publishes the result, its part, in global memory, so that a block need
// not wait for its own warps. The parts of a unit tile are a row of whole cache lines: polling takes two to three times
// as long if several blocks write to the same line. All threads poll, SEQS threads per row, and the warps' sums are
// passed to all threads through shared memory.
#pragma once
#include "resident/kernels/warp_parts.cuh"

// Returns the beginning of the next cache line.
DEVICE u64* cache_line(u64* words) { return reinterpret_cast<u64*>((reinterpret_cast<i64>(words) + 127) / 128 * 128); }

struct GridReductions {
  // words of a part: whole vectors
  static constexpr int PART = EXCHANGED_PAIRS > 1 ? (EXCHANGED_PAIRS + 1) / 2 * 2 : 1;
  static constexpr int ROWS = BLOCKS * UNIT_TILES, ROW_WORDS = (SEQS * PART + 15) / 16 * 16;
  static constexpr i64 WORDS = i64(EXCHANGE_BUFFERS) * ROWS * ROW_WORDS;  // words of a group in global memory
  static constexpr int AT_ONCE = THREADS / SEQS, OF_WARP = 32 / SEQS;     // rows
  static constexpr int ROUNDS = (ROWS + AT_ONCE - 1) / AT_ONCE, TOGETHER = ROUNDS < 4 ? ROUNDS : 4;  // rows per thread
  static constexpr int ADDERS = ROWS < AT_ONCE ? (ROWS + OF_WARP - 1) / OF_WARP : WARPS;             // warps that poll
  static constexpr int SUM_FLOATS = WARPS * SEQS * 4 * EXCHANGED_VECTORS;
  static constexpr int SHARED = 2 * SUM_FLOATS * 4;  // threads may still read the previous exchange
  static_assert(!GRID || HOLDERS == 1);
  float* memory;   // in shared memory: sums [2][warp][position][VECTORS of 4]
  u64* published;  // [buffer][row][position][PART]
  const ThreadCoord& coord;

  // Returns the position in a row of the lane's pair p, i.e. of its sequence. The positions of a warp's sequences are
  // consecutive.
  DEVICE int position(int p) const {
    return (coord.cell_slice * PAIRS + p) * (32 / SEQUENCE_LANES) + coord.lane % (32 / SEQUENCE_LANES);
  }
  DEVICE u64* row(int buffer, int number) const { return published + i64(buffer * ROWS + number) * ROW_WORDS; }
  // Clears the words that this block publishes.
  DEVICE void clear() const {
    for (int buffer = 0; buffer < EXCHANGE_BUFFERS; buffer++)
      for (int i = threadIdx.x; i < UNIT_TILES * ROW_WORDS; i += THREADS)
        publish_phase(row(buffer, coord.rank * UNIT_TILES) + i, {}, 0);
  }

  // Reduces over the units of the head, as UnitReductions::reduce. `buffer` is that of exchange NUMBER of the step. All
  // threads of the block call this.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(int buffer, u32 phase, const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    begin<SUMS, MOMENTS, MAXIMA>(buffer, phase, values);
    end<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer, phase, result);
  }
  // The same in two parts: publishes the warp's part,
  template <int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void begin(int buffer, u32 phase, const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    if (coord.has_cells()) {
      UNROLL for (int p = 0; p < PAIRS; p++) {
        Part part;
        reduce_warp<SUMS, MOMENTS, MAXIMA>(part, values, p, coord);
        if (coord.lane < 32 / SEQUENCE_LANES)
          publish(row(buffer, own_part(coord)) + position(p) * PART, part, phase ^ 1);
      }
    }
  }
  // and waits for all parts and adds them up.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void end(int buffer, u32 phase, float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    float* parts = memory + NUMBER % 2 * SUM_FLOATS;
    if (coord.warp < ADDERS) {
      Part sum;
      add_published(sum, row(buffer, 0) + coord.lane % SEQS * PART, phase ^ 1);
      if (coord.lane < SEQS) sum.store(parts + (coord.warp * SEQS + coord.lane) * 4 * Part::VECTORS);
    }
    __syncthreads();
    if (!coord.has_cells()) return;
    UNROLL for (int p = 0; p < PAIRS; p++) {
      Part total;
      total.load(parts + position(p) * 4 * Part::VECTORS);
      UNROLL for (int warp = 1; warp < ADDERS; warp++) {
        Part other;
        other.load(parts + (warp * SEQS + position(p)) * 4 * Part::VECTORS);
        total.add(other, units_of_warp(warp));
      }
      UNROLL for (int i = 0; i < Part::RESULTS; i++)
        UNROLL for (int q = p * PAIR; q < p * PAIR + PAIR; q++) result[i][q] = total.result(i);
    }
  }

 private:
  // Returns the number of units in the rows that a warp adds up.
  static DEVICE float units_of_warp(int warp) {
    float units = 0;
    UNROLL for (int k = 0; k < ROUNDS; k++)
      UNROLL for (int i = 0; i < OF_WARP; i++) {
        const int number = k * AT_ONCE + warp * OF_WARP + i;
        if (number < ROWS) units += units_of_part(number);
      }
    return units;
  }
  // Stores a part as pairs of words. The lowest bit of a pair's first word is lost to the phase, so shifts and maxima,
  // which are the last words of a part, are second words.
  template <class Part>
  static DEVICE void publish(u64* to, const Part& part, u32 phase) {
    auto word = [&](int i) { return i < 0 ? 0 : __float_as_uint(part.words[i < 0 ? 0 : i]); };
    auto pair =
        [&](int i) { return make_uint2(word(i + Part::WORDS - 2 * Part::PAIRS), word(i + Part::WORDS - Part::PAIRS)); };
    UNROLL for (int i = 0; i + 1 < Part::PAIRS; i += 2) {
      const uint2 two[] = {pair(i), pair(i + 1)};
      publish_phase(to + i, two, phase);
    }
    if (Part::PAIRS % 2) publish_phase(to + Part::PAIRS - 1, pair(Part::PAIRS - 1), phase);
  }
  // A part as it is published, in pairs of words.
  template <class Part>
  struct Pairs {
    uint2 two[Part::PAIRS / 2 + 1][2], one;
    DEVICE void peek(const u64* from) {
      UNROLL for (int i = 0; i < Part::PAIRS / 2; i++) peek_phase(two[i], from + 2 * i);
      if (Part::PAIRS % 2) peek_phase(one, from + Part::PAIRS - 1);
    }
    DEVICE bool in_phase(u32 phase) const {
      bool all = Part::PAIRS % 2 == 0 || ::in_phase(one, phase);
      UNROLL for (int i = 0; i < Part::PAIRS / 2; i++) all &= ::in_phase(two[i], phase);
      return all;
    }
    DEVICE uint2 pair(int i) const { return i / 2 < Part::PAIRS / 2 ? two[i / 2][i % 2] : one; }
    DEVICE void get(Part& part) const {
      UNROLL for (int i = 0; i < Part::WORDS; i++) {
        const int at = i + 2 * Part::PAIRS - Part::WORDS;
        part.words[i] = __uint_as_float(at < Part::PAIRS ? pair(at).x : pair(at - Part::PAIRS).y);
      }
    }
  };

  // Adds up the rows that this warp polls, for the lane's sequence. `column` is that sequence's part in row 0.
  template <class Part>
  DEVICE void add_published(Part& sum, const u64* column, u32 phase) const {
    const int own = static_cast<int>(threadIdx.x) / SEQS;
#pragma unroll 1
    for (int first = 0; first < ROUNDS; first += TOGETHER) {
      Pairs<Part> pairs[TOGETHER];
      poll(pairs, column, first * AT_ONCE + own, phase);
      UNROLL for (int k = 0; k < TOGETHER; k++) {
        Part part;
        pairs[k].get(part);
        if (k == 0 && first == 0) begin(sum, part);
        const int number = (first + k) * AT_ONCE + own;
        if (number < ROWS) sum.add(part, units_of_part(number));
      }
    }
    sum.template add_lanes<SEQS>();
  }
  // Initialises a lane's sum as that of no part, with the shifts of the warp's first row.
  template <class Part>
  DEVICE void begin(Part& sum, const Part& part) const {
    UNROLL for (int i = 0; i < Part::WORDS; i++) {
      const bool is_shift = i >= Part::ADDED && i < Part::ADDED + Part::MOMENTS;
      sum.words[i] = i < Part::ADDED ? 0 : is_shift ? __shfl_sync(~0u, part.words[i], coord.lane % SEQS) : -INFINITY;
    }
  }
  // Waits for the TOGETHER rows of this thread, from number `own` on, AT_ONCE apart. Polls all missing rows at once,
  // which takes as long as polling one.
  template <class Part>
  static DEVICE void poll(Pairs<Part> (&pairs)[TOGETHER], const u64* column, int own, u32 phase) {
    bool done[TOGETHER], all = false;
    UNROLL for (int k = 0; k < TOGETHER; k++) done[k] = own + k * AT_ONCE >= ROWS;
    while (!all) {
      all = true;
      UNROLL for (int k = 0; k < TOGETHER; k++)
        if (!done[k]) pairs[k].peek(column + i64(own + k * AT_ONCE) * ROW_WORDS);
      UNROLL for (int k = 0; k < TOGETHER; k++) {
        done[k] |= pairs[k].in_phase(phase);
        all &= done[k];
      }
    }
  }
};
