// What the phases of a step share, for few and for many sequences. Each phase begins with copies of weights, before it waits for
// the results of the last one, so that nobody waits for copies.
#pragma once
#include "decoding/kernels/draw.cuh"
#include "decoding/kernels/exchange.cuh"
#include "decoding/kernels/products.cuh"
#include "kernels/memory.cuh"

// Loads a row that other blocks wrote.
DEVICE void load_exchanged(Row& row, const float* from) {
  row.for_each([&](float (&v)[4], int at) {
    const uint4 words = load_exchanged(reinterpret_cast<const uint4*>(from + at), true);
    v[0] = __uint_as_float(words.x), v[1] = __uint_as_float(words.y), v[2] = __uint_as_float(words.z), v[3] = __uint_as_float(words.w);
  });
}

// The gate that is number k of its class.
DEVICE constexpr int gate_of(const int (&places)[GATES], int k) {
  for (int j = 0; j < GATES; j++)
    if (places[j] == k) return j;
  return 0;
}

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + op_erf(x * 0.70710678f)); }

// Adds to the sums of all gates of eight units the products with R, of h [B, WIDTH] of the step before. Chunks are in the order
// of the gates of their class.
DEVICE void add_recurrent(Weights& weights, const float* h, int unit0, i64 B, Sums (&c)[GATES]) {
  Operand h_before;
  load_operand(h_before, D / VECTOR, B, [&](int sequence, int at) { return rounded(h + sequence * WIDTH + unit0 / D * D + at); });
  auto of_recurrent = [&](auto k) -> Sums& { constexpr int gate = gate_of(RECURRENT_OF, k); return c[gate]; };
  weights.multiply<GR>(of_recurrent, [&](int) -> const Operand& { return h_before; }, D / VECTOR);
}

// Copies h [B, WIDTH] of this block's units to their state, when all blocks have read the one before.
DEVICE void store_h(float* state, const float* h, i64 B) {
  for (int tile = first_unit_tile(); tile < UNIT_TILES; tile += GRID)
    for (int cell = threadIdx.x; cell < B * 8; cell += THREADS) {
      const int at = cell / 8 * WIDTH + tile * 8 + cell % 8;
      state[at] = h[at];
    }
}

// What is made of the logits [B, CLASSES]: they are written, the largest ones are chosen, or tokens are drawn by keys [B]; each
// unless it is null.
struct Choice {
  scalar* logits;
  u64* best;  // [B], of the logits or, with keys, of their scores in a draw; zero before and after
  i64* chosen;
  i64 *history, *cursor;  // the chosen tokens are row *cursor of the history; it moves on
  u32* keys;              // they move on
  const float* temperature;

  // The operand is the input of the output layer.
  DEVICE void compute(Products& shared, Weights& weights, const Operand& operand, i64 B) const {
    u64 largest[WARP_SEQS] = {};
    multiply_rows(shared, weights, operand, blockIdx.x, CLASS_TILES, B, [&](int sequence, int n, int row, float sum) {
      if (row >= CLASSES) return;
      const scalar logit = scalar(sum);
      if (logits) logits[i64(sequence) * CLASSES + row] = logit;
      const float score = keys ? score_of_draw(float(logit) / *temperature, keys[sequence], row) : float(logit);
      largest[n] = max(largest[n], ordered(score, row));
    });
    if (!chosen) return;
    for_each_sequence(B, [&](int sequence, int n) {
#pragma unroll
      for (int other = 1; other < 32; other *= 2) largest[n] = max(largest[n], __shfl_xor_sync(0xffffffffu, largest[n], other));
      if (threadIdx.x % 32 == 0) raise_to(best + sequence, largest[n]);
    });
  }
  // Called by the last block.
  DEVICE void finish(i64 B) const {
    for (int sequence = threadIdx.x; chosen && sequence < B; sequence += THREADS) {
      chosen[sequence] = u32(~best[sequence]);
      if (history) history[*cursor * B + sequence] = chosen[sequence];
      if (keys) keys[sequence] += NEXT_KEY;
      best[sequence] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0 && history) ++*cursor;
  }
};
