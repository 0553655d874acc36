// Reductions over the units of a head within a step, between the blocks of a cluster.
//
// A warp reduces its units by shuffles, and its lanes send the part to every block of the cluster. Every warp adds up what it has
// received for its own sequences. No barrier of a block is needed: who receives an exchange knows that all warps of the cluster have
// read the one before, so that its buffer may be written again.
#pragma once
#include "resident/kernels/unit_reductions.cuh"

constexpr int PART_FLOATS = EXCHANGED_WORDS <= 2 ? 2 : 4 * EXCHANGED_VECTORS;
constexpr int RECEIVED_ROW = BLOCKS * CONTRIBUTIONS * PART_FLOATS + 8;  // floats of a sequence, in other banks than the next one's
constexpr int RECEIVED_BYTES = EXCHANGE_BUFFERS * SEQUENCES * RECEIVED_ROW * 4;

template <class Part>
constexpr int SENT_FLOATS = Part::WORDS <= 2 ? 2 : 4 * Part::VECTORS;

struct ClusterReductions {
  static constexpr int SHARED = RECEIVED_BYTES + (EXCHANGE_BUFFERS * 8 + 15) / 16 * 16;
  const char* received;  // [buffer][sequence][rank][contribution], and a barrier for each buffer
  const ThreadCoord& coord;
  DEVICE u32 barrier(int buffer) const { return shared_address(received) + RECEIVED_BYTES + buffer * 8; }
  DEVICE void init() const {
    if (threadIdx.x == 0)
      for (int i = 0; i < EXCHANGE_BUFFERS; i++) barrier_init(barrier(i));
  }
  DEVICE bool is_unit(int q) const { return PADDED == D || coord.unit(q) < D; }

  template <int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(int buffer, u32 phase, const float (&of)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    using Part = Partial<SUMS, MOMENTS, MAXIMA>;
    if (!coord.has_cells()) return;
    if (threadIdx.x == 0) barrier_expect(barrier(buffer), SEQUENCES * BLOCKS * CONTRIBUTIONS * SENT_FLOATS<Part> * 4);
    Part parts[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; p++) reduce_warp<SUMS, MOMENTS, MAXIMA>(parts[p], of, p);
    __syncwarp();  // all lanes have read the exchange before, which a part tells those that receive it
#pragma unroll
    for (int p = 0; p < PAIRS; p++) send_part(parts[p], buffer, coord.sequence(p * PAIR));
    barrier_wait(barrier(buffer), phase);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      Part total;
      total_received(total, buffer, coord.sequence(p * PAIR));
#pragma unroll
      for (int i = 0; i < Part::RESULTS; i++)
#pragma unroll
        for (int q = p * PAIR; q < p * PAIR + PAIR; q++) result[i][q] = total.result(i);
    }
  }

 private:
  // Reduces the warp's units of the lane's pair p.
  template <int SUMS, int MOMENTS, int MAXIMA, class Part>
  DEVICE void reduce_warp(Part& part, const float (&of)[SUMS + MOMENTS + MAXIMA][CELLS], int p) const {
    const int first = p * PAIR, last = first + PAIR - 1;
    const bool valid[2] = {is_unit(0), is_unit(PAIR - 1)};
    auto number = [&](int i, int q) { return valid[q % PAIR] ? of[i][q] : 0; };
#pragma unroll
    for (int i = 0; i < 4 * Part::VECTORS; i++) part.words[i] = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) part.words[i] = number(i, first) + (PAIR == 2 ? number(i, last) : 0);
#pragma unroll
    for (int i = 0; i < MOMENTS; i++) {
      const float shift = __shfl_sync(~0u, number(SUMS + i, first), coord.lane_in_quad);
      const float a = valid[0] ? of[SUMS + i][first] - shift : 0, b = PAIR == 2 && valid[1] ? of[SUMS + i][last] - shift : 0;
      part.words[SUMS + 2 * i] = a + b, part.words[SUMS + 2 * i + 1] = fmaf(a, a, b * b);
      part.words[Part::ADDED + i] = shift;
    }
#pragma unroll
    for (int i = 0; i < MAXIMA; i++) {
      float largest = valid[0] ? of[SUMS + MOMENTS + i][first] : -INFINITY;
      if (PAIR == 2 && valid[1]) largest = op_max(largest, of[SUMS + MOMENTS + i][last]);
      part.words[Part::ADDED + MOMENTS + i] = largest;
    }
    add_quads(part);
  }
  // Adds up what the eight lanes with the same lane_in_quad have, whose shifts are the same.
  template <class Part>
  static DEVICE void add_quads(Part& part) {
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) {
#pragma unroll
      for (int i = 0; i < Part::ADDED; i++) part.words[i] += __shfl_xor_sync(~0u, part.words[i], mask);
#pragma unroll
      for (int i = Part::ADDED + Part::MOMENTS; i < Part::WORDS; i++)
        part.words[i] = op_max(part.words[i], __shfl_xor_sync(~0u, part.words[i], mask));
    }
  }
  // Sends the warp's part of a sequence to every eighth block, from the lane's quad on.
  template <class Part>
  DEVICE void send_part(const Part& part, int buffer, int sequence) const {
    if (SEQUENCES < SEQS && sequence >= SEQUENCES) return;
    const int contribution = coord.unit_tile * HOLDERS + (HOLDERS == 2 ? coord.k_slice % 2 : 0);
    const u32 place = (buffer * SEQUENCES + sequence) * RECEIVED_ROW + (coord.rank * CONTRIBUTIONS + contribution) * SENT_FLOATS<Part>;
    auto word = [&](int i) { return __float_as_uint(part.words[i]); };
#pragma unroll
    for (int first = 0; first < BLOCKS; first += 8) {
      const int rank = first + coord.quad;
      if (first + 8 > BLOCKS && rank >= BLOCKS) continue;
      const u32 base = remote_address(shared_address(received), rank), to = base + place * 4, signal = base + RECEIVED_BYTES + buffer * 8;
      if constexpr (SENT_FLOATS<Part> == 2) {
        send(to, make_uint2(word(0), word(1)), signal);
      } else {
#pragma unroll
        for (int k = 0; k < Part::VECTORS; k++)
          send(to + 16 * k, make_uint4(word(4 * k), word(4 * k + 1), word(4 * k + 2), word(4 * k + 3)), signal);
      }
    }
  }
  // Adds up what has been received for a sequence.
  template <class Part>
  DEVICE void total_received(Part& total, int buffer, int sequence) const {
    const float* row = reinterpret_cast<const float*>(received) + (buffer * SEQUENCES + min(sequence, SEQUENCES - 1)) * RECEIVED_ROW;
    load(total, row);  // whose shifts and maxima all lanes take
#pragma unroll
    for (int i = 0; i < Part::ADDED; i++) total.words[i] = 0;
#pragma unroll
    for (int first = 0; first < BLOCKS * CONTRIBUTIONS; first += 8) {
      const int number = first + coord.quad;
      if (first + 8 > BLOCKS * CONTRIBUTIONS && number >= BLOCKS * CONTRIBUTIONS) continue;
      Part other;
      load(other, row + number * SENT_FLOATS<Part>);
      total.add(other, units(number));
    }
    add_quads(total);
  }
  template <class Part>
  static DEVICE void load(Part& part, const float* from) {
    if constexpr (SENT_FLOATS<Part> == 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      part.words[0] = two.x, part.words[1] = two.y;
    } else {
      part.load(from);
    }
  }
  // Return how many units a contribution has.
  static DEVICE float units(int number) {
    if (PADDED == D) return 16.0f / HOLDERS;
    const int first = number / CONTRIBUTIONS * UNITS + number % CONTRIBUTIONS / HOLDERS * 16;
    return max(min(D - first, 16), 0) / float(HOLDERS);
  }
};
