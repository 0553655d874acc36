// Reduce-scatter of the partial sums of the gradient of h, between the blocks of a group.
#pragma once
#include "resident/kernels/backward_memory.cuh"

// Returns the index of a lane's partial sums of a 16 x 8 tile, which are two units for two sequences. They are ordered
// by sequence, so that those of the used sequences are contiguous. A cluster with a fixed number of sequences has
// memory for these only.
constexpr int PARTIAL_WORDS = BYTES;
constexpr int RECEIVED_PAIRS = CLUSTERED ? SEQUENCES / 2 : 4 * BATCH_TILES;  // pairs of sequences
DEVICE int partial_offset(int rank, int tile, int n, int lane_in_quad, int quad) {
  const int unit_tile = rank * UNIT_TILES + tile % UNIT_TILES;
  if constexpr (RECEIVED_PAIRS < 4 * BATCH_TILES)
    return ((unit_tile * RECEIVED_PAIRS + min(4 * n + lane_in_quad, RECEIVED_PAIRS - 1)) * 8 + quad) * PARTIAL_WORDS;
  return ((unit_tile * BATCH_TILES + n) * 32 + lane_in_quad * 8 + quad) * PARTIAL_WORDS;
}
DEVICE int partial_offset(int rank, int tile, int n, const ThreadCoord& coord) {
  return partial_offset(rank, tile, n, coord.lane_in_quad, coord.quad);
}

// float32: word i of a lane's sums is at position i ^ bank_key, so that receivers, which read the same word of every
// lane, access different banks. DENSE, they read two words each of half of the lanes.
DEVICE int bank_key(int lane_in_quad) { return DENSE ? 0 : lane_in_quad; }
DEVICE uint4 spread_over_banks(uint4 v, int key) {
  if (key & 1) v = make_uint4(v.y, v.x, v.w, v.z);
  if (key & 2) v = make_uint4(v.z, v.w, v.x, v.y);
  return v;
}

// Scatter: sends every block its tiles of c, this block's partial sums of the tiles from `first` on. In 16 bits, a
// lane's sums are two words, each of two units for one sequence, which half of the lanes swap to access different
// banks.
DEVICE void send_partials(const float (&c)[M_CHUNK][BATCH_TILES][4], int first, u32 receive_buffer, u32 barrier,
                          const ThreadCoord& coord) {
  UNROLL for (int n = 0; n < BATCH_TILES; n++) {
    if (8 * n + 2 * coord.lane_in_quad >= coord.used_columns()) break;
    UNROLL for (int m = 0; m < M_CHUNK; m++) {
      const float(&part)[4] = c[m][n];
      const int tile = first + m, rank = tile / UNIT_TILES;
      const u32 to = remote_address(receive_buffer, rank) + partial_offset(coord.rank, tile, n, coord) * 4;
      const u32 signal = remote_address(barrier, rank);
      if constexpr (BYTES == 2) {
        u32 even = pack(part[0], part[2]), odd = pack(part[1], part[3]);
        send(to, coord.lane_in_quad < 2 ? make_uint2(even, odd) : make_uint2(odd, even), signal);
      } else {
        const uint4 words =
            make_uint4(__float_as_uint(part[0]), __float_as_uint(part[2]), __float_as_uint(part[1]),
                       __float_as_uint(part[3]));
        send(to, spread_over_banks(words, bank_key(coord.lane_in_quad)), signal);
      }
    }
  }
}

// Reduce: adds up the partial sums of the lane's cells that all blocks have sent. They must have arrived
// (barrier_wait).
DEVICE void reduce_received(float (&sum)[CELLS], const u32* receive_buffer, const ThreadCoord& coord) {
  UNROLL for (int q = 0; q < CELLS; q++) sum[q] = 0;
  const int sender = DENSE ? coord.lane_in_quad % 2 : coord.lane_in_quad;  // lane_in_quad of the sender
  UNROLL for (int p = 0; p < PAIRS; p++) {
    const int cell = coord.cell_slice * CELLS + p * PAIR;
    const int second = DENSE ? cell % 2 : cell / 2 % 2;          // of the sender's sequences
    const int unit = DENSE ? coord.lane_in_quad / 2 : cell % 2;  // of its two
    UNROLL for (int rank = 0; rank < BLOCKS; rank++) {
      const u32* from = receive_buffer +
          partial_offset(rank, coord.unit_tile, DENSE ? 0 : cell / 4, sender, coord.quad);
      if constexpr (BYTES == 2) {
        const float2 pair = unpack(from[second ^ sender / 2]);
        if constexpr (PAIR == 2) sum[2 * p] += pair.x, sum[2 * p + 1] += pair.y;
        else sum[p] += unit ? pair.y : pair.x;
      } else {
        UNROLL for (int i = 0; i < PAIR; i++)
          sum[p * PAIR + i] += __uint_as_float(from[(2 * second + unit + i) ^ bank_key(sender)]);
      }
    }
  }
}

// The same through global memory. `partials` is [2 buffers][to block][partial_offset] of one group, in pairs of words.
constexpr i64 BLOCK_PARTIALS = PADDED * SEQS / 4 * PARTIAL_WORDS / 2;
constexpr i64 GROUP_PARTIALS = 2 * BLOCKS * BLOCK_PARTIALS;
DEVICE u64* partials_to(u64* partials, int step, int to) {
  return partials + ((step & 1) * BLOCKS + to) * BLOCK_PARTIALS;
}
DEVICE u32 phase_of(int step) { return (step >> 1 & 1) ^ 1; }
constexpr int POLLED_WORDS = 32;  // upper bound of the words that a thread polls at once, in registers

// Clears this block's two receive buffers.
DEVICE void clear_partials(u64* partials, const ThreadCoord& coord) {
  for (int step = 0; step < 2; step++)
    for (int i = threadIdx.x; i < BLOCK_PARTIALS; i += THREADS)
      publish_phase(partials_to(partials, step, coord.rank) + i, {}, 0);
}

// Scatter: publishes this block's partial sums of the tiles from `first` on.
DEVICE void publish_partials(const float (&c)[M_CHUNK][BATCH_TILES][4], int first, u64* partials, int step,
                             const ThreadCoord& coord) {
  UNROLL for (int m = 0; m < M_CHUNK; m++)
    UNROLL for (int n = 0; n < BATCH_TILES; n++) {
      const float(&part)[4] = c[m][n];
      int tile = first + m;
      u64* to = partials_to(partials, step, tile / UNIT_TILES) + partial_offset(coord.rank, tile, n, coord) / 2;
      if constexpr (BYTES == 2) {
        publish_phase(to, make_uint2(pack(part[0], part[2]), pack(part[1], part[3])), phase_of(step));
      } else {
        const uint2 words[] = {make_uint2(__float_as_uint(part[0]), __float_as_uint(part[2])),
                               make_uint2(__float_as_uint(part[1]), __float_as_uint(part[3]))};
        publish_phase(to, words, phase_of(step));
      }
    }
}

// Reduce: every warp of a unit tile adds up the sums of M_TILES of the blocks, in an order that does not depend on
// their arrival. Polls what is missing of TOGETHER blocks at once, which takes as long as polling one.
DEVICE void reduce_published(float (&c)[1][BATCH_TILES][4], u64* partials, int step, const ThreadCoord& coord) {
  constexpr int MOST = POLLED_WORDS / (PARTIAL_WORDS * BATCH_TILES), ROUNDS = (M_TILES + MOST - 1) / MOST;
  constexpr int TOGETHER = (M_TILES + ROUNDS - 1) / ROUNDS;
  const u64* own = partials_to(partials, step, coord.rank);
  UNROLL for (int n = 0; n < BATCH_TILES; n++)
    UNROLL for (int r = 0; r < 4; r++) c[0][n][r] = 0;
#pragma unroll 1
  for (int k = 0; k < M_TILES; k += TOGETHER) {
    uint2 part[TOGETHER][BATCH_TILES][PARTIAL_WORDS / 2];
    bool done[TOGETHER][BATCH_TILES], all = false;
    UNROLL for (int i = 0; i < TOGETHER; i++)
      UNROLL for (int n = 0; n < BATCH_TILES; n++) done[i][n] = k + i >= M_TILES;
    while (!all) {
      all = true;
      UNROLL for (int i = 0; i < TOGETHER; i++)
        UNROLL for (int n = 0; n < BATCH_TILES; n++)
          if (!done[i][n])
            peek_phase(part[i][n],
                       own + partial_offset((k + i) * K_SLICES + coord.k_slice, coord.unit_tile, n, coord) / 2);
      UNROLL for (int i = 0; i < TOGETHER; i++)
        UNROLL for (int n = 0; n < BATCH_TILES; n++) {
          done[i][n] |= in_phase(part[i][n], phase_of(step));
          all &= done[i][n];
        }
    }
    UNROLL for (int i = 0; i < TOGETHER; i++)
      UNROLL for (int n = 0; n < BATCH_TILES; n++) {
        if (k + i >= M_TILES) continue;
        float(&sum)[4] = c[0][n];
        const uint2 first = part[i][n][0], second = part[i][n][PARTIAL_WORDS / 2 - 1];
        if constexpr (BYTES == 2) {
          float2 even = unpack(first.x), odd = unpack(first.y);
          sum[0] += even.x, sum[2] += even.y, sum[1] += odd.x, sum[3] += odd.y;
        } else {
          sum[0] += __uint_as_float(first.x), sum[2] += __uint_as_float(first.y);
          sum[1] += __uint_as_float(second.x), sum[3] += __uint_as_float(second.y);
        }
      }
  }
}
