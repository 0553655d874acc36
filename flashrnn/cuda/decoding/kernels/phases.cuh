// Parts of a decoding step that the kernels for few and for many sequences share.
#pragma once
#include "decoding/kernels/cells.cuh"
#include "decoding/kernels/draw.cuh"
#include "decoding/kernels/exchange.cuh"
#include "decoding/kernels/products.cuh"
#include "kernels/memory.cuh"

// Initialises shared memory. Called by all threads of a block, before anything else.
DEVICE void begin(Products& shared, const i64* table) {
  for (int i = threadIdx.x; i < BLOCKS * ENTRIES; i += blockDim.x) shared.table[i] = table[i];
  if (threadIdx.x == 0) shared.slots.init();
  __syncthreads();
}

// A row of which each warp holds 128 numbers. A single warp would take longer, because it would execute the
// instructions for all of them.
using Part = RowOf<false>;
// Combines the means and sums of squares of these parts, for RowOf::normalize. All warps call it for each norm.
struct Join {
  float2 (&moments)[WARPS];
  // Replaces the mean and the sum of squares of this warp's 128 numbers by those of all K parts.
  template <int K>
  DEVICE void over(float& mean, float& squares) const {
    const int warp = threadIdx.x / 32, begin = warp / K * K, first = begin + K <= WARPS ? begin : 0;
    if (threadIdx.x % 32 == 0) moments[warp] = make_float2(mean, squares);
    sync_consumers();
    float2 parts[K];
    mean = squares = 0;
    UNROLL for (int k = 0; k < K; k++) parts[k] = moments[first + k], mean += parts[k].x * (1.0f / K);
    UNROLL for (int k = 0; k < K; k++) squares += parts[k].y + 128 * (parts[k].x - mean) * (parts[k].x - mean);
  }
};

// Loads K marked rows that other blocks wrote, `stride` apart. Lanes that hold no numbers of a row load those of
// others.
template <bool WHOLE, int K>
DEVICE void load_marked(RowOf<WHOLE> (&rows)[K], const float* from, i64 stride, u32 mark) {
  constexpr int LOADS = RowOf<WHOLE>::LOADS;
  uint4 words[K * LOADS];
  load_marked<true>(words, mark,
                    [&](int k) { return from + k / LOADS * stride + min(rows[0].place(k % LOADS), WIDTH - 4); });
  UNROLL for (int k = 0; k < K; k++) {
    int i = 0;
    rows[k].for_each([&](float (&v)[4], int) {
      const uint4 four = words[k * LOADS + i++];
      v[0] = __uint_as_float(four.x), v[1] = __uint_as_float(four.y), v[2] = __uint_as_float(four.z),
          v[3] = __uint_as_float(four.w);
    });
  }
}
template <bool WHOLE>
DEVICE void load_marked(RowOf<WHOLE>& row, const float* from, u32 mark) {
  RowOf<WHOLE> rows[1];
  load_marked(rows, from, 0, mark);
  row = rows[0];
}

// Divides the registers between the warps that multiply and the warpgroup that copies, which needs few. Returns whether
// this thread is in the latter.
DEVICE bool is_producer() {
  if (threadIdx.x < THREADS) return take_registers<240>(), false;
  return give_registers<24>(), true;
}

// Returns the index of the product for gate number k of a class. There is a product for each gate that is not constant,
// in order.
DEVICE constexpr int product_of(const int (&places)[GATES], int k) {
  for (int j = 0; j < GATES; j++)
    if (places[j] == k) return STORED_OF[j];
  return 0;
}

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + op_erf(x * 0.70710678f)); }

// Adds the products of R and the previous h [B, WIDTH] to the sums of eight units. The chunks of R are in the order of
// the recurrent gates.
DEVICE void add_recurrent(Weights& weights, const float* h, int unit0, i64 B, Sums (&c)[STORED]) {
  Operand h_before;
  load_operand(h_before, D / VECTOR, B,
               [&](int sequence, int at) { return rounded(h + sequence * WIDTH + unit0 / D * D + at); });
  auto gate_sums = [&](auto k) -> Sums& { constexpr int product = product_of(RECURRENT_OF, k); return c[product]; };
  weights.multiply<GR, uint4, RECURRENT_STRIDE>(gate_sums, [&](int, int i) -> const Vectors& { return h_before[i]; },
                                                D / VECTOR);
}

// Adds the products of the input, whose vectors are operand(k, i), to the sums. The chunks are in the order of the
// input gates.
template <class O>
DEVICE void add_input(Weights& weights, const Scales<GI>& scales, O operand, Sums (&c)[STORED]) {
  auto gate_sums = [&](auto k) -> Sums& { constexpr int product = product_of(INPUT_OF, k); return c[product]; };
  if constexpr (!INT8) return weights.multiply<GI>(gate_sums, operand, VECTORS);
  Sums sums[GI] = {};
  weights.multiply<GI>([&](auto k) -> Sums& { return sums[k]; }, operand, VECTORS);
  each<GI>([&](auto k) {
    scales.apply(sums[k], k);
    UNROLL for (int i = 0; i < 4; i++) gate_sums(k)[0][0][i] += sums[k][0][0][i];
  });
}

// Copies this block's units of h [B, WIDTH] to the model's state. All blocks have read the previous state by then:
// their results, which have arrived, depend on it.
DEVICE void store_h(float* state, const float* h, i64 B) {
  for (int tile = first_unit_tile(); tile < UNIT_TILES; tile += GRID)
    for (int cell = threadIdx.x; cell < B * 8; cell += THREADS) {
      const int at = cell / 8 * WIDTH + tile * 8 + cell % 8;
      store_exchanged(state + at, unmarked(h[at]));
    }
}

// The use of the logits [B, CLASSES]: they are stored in `logits`, and the largest is chosen or, with keys [B], a token
// is sampled. Each output is optional (null).
struct Choice {
  scalar* logits;
  u64* best;  // [B], the largest logits or, with keys, scores; zero before and after
  i64* chosen;
  i64 *history, *cursor;  // the chosen tokens become row *cursor of the history, and the cursor is incremented
  u32* keys;              // advanced after use
  const float* temperature;
  u32* counters;
  i64 B;
  DEVICE explicit Choice(const Params& params)
      : logits(params.logits), best(params.best), chosen(params.chosen), history(params.history), cursor(params.cursor),
        keys(params.keys), temperature(params.temperature), counters(params.counters), B(params.B) {}

  // Stores a logit, and returns the score of its class with the index, as an `ordered` number: the class with the
  // largest is chosen.
  DEVICE u64 rate(int sequence, int row, float sum) const {
    const scalar logit = scalar(sum);
    if (logits) logits[i64(sequence) * CLASSES + row] = logit;
    const float score = keys ? score_of_draw(float(logit) / *temperature, keys[sequence], row) : float(logit);
    return ordered(score, row);
  }
  // Takes the largest of what LANES lanes have found, which have rated classes of the same sequence.
  template <int LANES>
  DEVICE void raise(int sequence, u64 largest) const {
    if (!chosen) return;
    UNROLL for (int other = 1; other < LANES; other *= 2)
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    if (threadIdx.x % LANES == 0 && largest) raise_to(best + sequence, largest);  // 0: a sequence beyond the batch
  }
  // Called at the end of the kernel. The last block of the grid stores the chosen tokens and resets the counters.
  // `before` is in shared memory.
  DEVICE void finish(u32& before) const {
    if (!CountingBarrier::is_last(counters + 1, before)) return;
    for (int sequence = threadIdx.x; chosen && sequence < B; sequence += THREADS) {
      chosen[sequence] = u32(~best[sequence]);
      if (history) history[*cursor * B + sequence] = chosen[sequence];
      if (keys) keys[sequence] += NEXT_KEY;
      best[sequence] = 0;
    }
    sync_consumers();
    if (threadIdx.x == 0 && history) ++*cursor;
    if (threadIdx.x == 0) counters[0] = counters[1] = 0, counters[2] += BLOCKS;
  }
};
