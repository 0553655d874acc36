// Reductions over the units of a head within a step, between the blocks of a cluster.
//
// A warp reduces its units by shuffles, and its lanes send the result, its part, to every block of the cluster. Every
// warp adds up the parts that its block has received for the warp's own sequences. This needs no block-wide barrier: a
// warp that receives the parts of an exchange knows that all warps of the cluster have read those of the previous
// exchange, so that buffer may be overwritten.
#pragma once
#include "resident/kernels/warp_parts.cuh"

// Returns the number of floats of a part in memory: two, or whole vectors of four.
constexpr int part_floats(int words) { return words <= 2 ? 2 : (words + 3) / 4 * 4; }
// Returns the offset in bytes of a buffer; a buffer is [part][sequence].
constexpr int received_before(int buffer) {
  int floats = 0;
  for (int i = 0; i < buffer; i++) floats += PARTS * SEQUENCES * part_floats(EXCHANGED_WORDS[exchange_of(i)]);
  return floats * 4;
}
constexpr int RECEIVED_BYTES = received_before(EXCHANGE_BUFFERS);

struct ClusterReductions {
  static constexpr int LANES = SEQUENCE_LANES;
  static constexpr int SHARED = RECEIVED_BYTES + (EXCHANGE_BUFFERS * 8 + 15) / 16 * 16;
  const char* received;  // the parts, and an mbarrier for each buffer
  const ThreadCoord& coord;
  DEVICE u32 barrier(int buffer) const { return shared_address(received) + RECEIVED_BYTES + buffer * 8; }
  // Initialises the mbarriers. The blocks of the cluster must synchronise afterwards.
  DEVICE void init() const {
    if (threadIdx.x == 0)
      for (int i = 0; i < EXCHANGE_BUFFERS; i++) barrier_init(barrier(i));
  }
  // Returns the lane's index among the lanes of its sequence.
  DEVICE int lane_of_sequence() const { return DENSE ? 2 * coord.quad + coord.lane_in_quad / 2 : coord.quad; }

  // Returns the offset of the buffer of exchange NUMBER.
  template <int NUMBER>
  static DEVICE u32 place_of(int buffer) {
    // negative: one of two
    const int first = EARLY_SUMS && NUMBER > 0 ? 2 : EXCHANGES > 1 && !EARLY_SUMS ? NUMBER : -1;
    return first >= 0 ? received_before(first > 0 ? first : 0) : buffer * received_before(1);
  }

  // Reduces over the units of the head, as UnitReductions::reduce. `buffer` is that of exchange NUMBER of the step,
  // `phase` the parity of its mbarrier. All warps with cells call this; the result of a lane is for its own sequences.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(int buffer, u32 phase, const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    begin<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer, values);
    end<NUMBER, SUMS, MOMENTS, MAXIMA>(buffer, phase, result);
  }
  // The same in two parts: sends the warp's part,
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void begin(int buffer, const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    if (!coord.computes_cells()) return;
    if (threadIdx.x == 0) barrier_expect(barrier(buffer), PARTS * coord.used_columns() * part_floats(Part::WORDS) * 4);
    const u32 before = place_of<NUMBER>(buffer);
    Part parts[PAIRS];
    UNROLL for (int p = 0; p < PAIRS; p++) reduce_warp<SUMS, MOMENTS, MAXIMA>(parts[p], values, p, coord);
    __syncwarp();  // all lanes have read the previous exchange: receiving a part implies that
    UNROLL for (int p = 0; p < PAIRS; p++) send_part(parts[p], before, barrier(buffer), coord.sequence(p * PAIR));
  }
  // and waits for all parts and adds them up.
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void end(int buffer, u32 phase, float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    if (!coord.computes_cells()) return;
    barrier_wait(barrier(buffer), phase);
    UNROLL for (int p = 0; p < PAIRS; p++) {
      Part total;
      total_received(total, place_of<NUMBER>(buffer), coord.sequence(p * PAIR));
      UNROLL for (int i = 0; i < Part::RESULTS; i++)
        UNROLL for (int q = p * PAIR; q < p * PAIR + PAIR; q++) result[i][q] = total.result(i);
    }
  }

 private:
  // Sends the warp's part of a sequence to every LANES-th block, beginning with the lane's index.
  template <class Part>
  DEVICE void send_part(const Part& part, u32 before, u32 barrier, int sequence) const {
    // SEQUENCES is a constant for the compiler.
    if (HAS_UNUSED_COLUMNS && sequence >= (ANY_SEQUENCES ? coord.used_columns() : SEQUENCES)) return;
    constexpr int FLOATS = part_floats(Part::WORDS);
    const u32 place = shared_address(received) + before + (own_part(coord) * SEQUENCES + sequence) * FLOATS * 4;
    auto word = [&](int i) { return __float_as_uint(part.words[i]); };
    UNROLL for (int first = 0; first < BLOCKS; first += LANES) {
      const int rank = first + lane_of_sequence();
      if (first + LANES > BLOCKS && rank >= BLOCKS) continue;
      const u32 to = remote_address(place, rank), signal = remote_address(barrier, rank);
      if constexpr (FLOATS == 2) send(to, make_uint2(word(0), word(1)), signal);
      else
        UNROLL for (int k = 0; k < FLOATS; k += 4)
          send(to + 4 * k, make_uint4(word(k), word(k + 1), word(k + 2), word(k + 3)), signal);
    }
  }
  // Adds up the parts that have been received for a sequence.
  template <class Part>
  DEVICE void total_received(Part& total, u32 before, int sequence) const {
    constexpr int FLOATS = part_floats(Part::WORDS);
    const float* parts = reinterpret_cast<const float*>(received + before) +
        min(sequence, coord.used_columns() - 1) * FLOATS;
    load(total, parts);  // all lanes start with the shifts and maxima of the first part
    UNROLL for (int i = 0; i < Part::ADDED; i++) total.words[i] = 0;
    UNROLL for (int first = 0; first < PARTS; first += LANES) {
      const int number = first + lane_of_sequence();
      if (first + LANES > PARTS && number >= PARTS) continue;
      Part other;
      load(other, parts + number * SEQUENCES * FLOATS);
      total.add(other, units_of_part(number));
    }
    total.template add_lanes<32 / LANES>();
  }
  template <class Part>
  static DEVICE void load(Part& part, const float* from) {
    if constexpr (Part::WORDS <= 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      part.words[0] = two.x, part.words[1] = two.y;
    } else {
      part.load(from);
    }
  }
};
