// The backward time loop with R streamed: rows are the units of an item, vectors are the gradients of the recurrent gates. The
// factors of the cell's gradient are computed from the stored gates before the block waits for its group.
#pragma once
#include "streaming/kernels/stream.cuh"
static_assert(ROWS == UNITS && K == GR * D);

// PARAMETERS as of flashrnn_stream_forward, and: initial; d_h (may be null), d_aux -> d_x, d_u. d_bias
// [B, GATES, N, D], zeros: the gradients of the biases are added to it, in float32. d_state: the gradient of the last states, at
// the end that of the initial ones. exchange [2, N, B, PADDED_K]: zeros.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_backward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const int items = Item::count(B), first = blockIdx.x;
  Stream stream(R, Item(first));
  for (i64 step = 0; step <= T; step++) {
    const i64 t = T - 1 - step;  // -1: the gradient of the initial states
    const scalar* before = exchange + (step & 1) * HEADS * B * PADDED_K;
    scalar* after = exchange + (~step & 1) * HEADS * B * PADDED_K;
    for (int index = first; index < items; index += gridDim.x) {
      const Item item(index), next(index + gridDim.x < items ? index + gridDim.x : first);
      float factors[CELLS][FACTORS], d_new[CELLS][STATES];
      bool carry[CELLS], carry_next[CELLS];
#pragma unroll
      for (int i = 0; i < CELLS; i++) {
        const CellCoord cell(item, i, B);
        if (!cell.valid) continue;
        carry_next[i] = !RESET || step == 0 || !reset[cell.sequence * T + t + 1];
#pragma unroll
        for (int k = 0; k < STATES; k++) d_new[i][k] = d_state[(k * B + cell.sequence) * ROW + cell.element];
        if (t < 0) continue;
        const i64 at = (cell.sequence * row_b + t * row_t) * ROW + cell.element, back = row_t * ROW;
        auto read = [&](const auto* from, int back_steps) {  // of step t - back_steps
          if (t >= AHEAD + back_steps) prefetch(from - AHEAD * back);
          return *from;
        };
        carry[i] = !RESET || !reset[cell.sequence * T + t];
        const UnitGates stored = read(gates + at, 0);
        float g[GATES], s[STATES];
#pragma unroll
        for (int j = 0; j < GATES; j++) g[j] = float(stored.of[j]);
        const float* first_state = initial + cell.sequence * ROW + cell.element;
        s[0] = !USES_H || !carry[i] ? 0 : t > 0 ? float(read(h + at - back, 1)) : *first_state;
#pragma unroll
        for (int k = 1; k < STATES; k++) {
          const i64 row = (k - 1) * B * T * ROW + at;
          s[k] = !carry[i] ? 0 : t > 0 ? float(read(aux + row - back, 1)) : first_state[k * B * ROW];
          if (HAS_D_AUX) d_new[i][k] += read(d_aux + row, 0);
        }
        if (d_h) d_new[i][0] += float(read(d_h + at, 0));
        cell_factors(g, s, factors[i]);
      }
      step_sums(sums, stream, item, next, before, counters, step, B);
      float d_g[CELLS][GATES], d_old[CELLS][STATES];
#pragma unroll
      for (int i = 0; i < CELLS; i++) {
        const CellCoord cell(item, i, B);
        if (!cell.valid) continue;
        if (carry_next[i]) d_new[i][0] += sum_of(sums, cell, cell.row);
        if (t < 0) continue;
        cell_backward(factors[i], d_new[i], d_g[i], d_old[i]);
#pragma unroll
        for (int j = 0; j < GATES; j++)
          if (RECURRENT_OF[j] >= 0) after[cell.exchanged(item, B, RECURRENT_OF[j])] = scalar(d_g[i][j]);
      }
      __syncthreads();
      if (threadIdx.x == 0) signal(counters + item.counter);
#pragma unroll
      for (int i = 0; i < CELLS; i++) {
        const CellCoord cell(item, i, B);
        if (!cell.valid) continue;
        const i64 row = cell.sequence * row_b + t * row_t;
#pragma unroll
        for (int k = 0; k < STATES; k++)
          d_state[(k * B + cell.sequence) * ROW + cell.element] = t < 0 ? d_new[i][k] : carry[i] ? d_old[i][k] : 0;
        if (t < 0) continue;
#pragma unroll
        for (int j = 0; j < GATES; j++) {
          if (INPUT_OF[j] >= 0) d_x[(row * GI + INPUT_OF[j]) * ROW + cell.element] = scalar(d_g[i][j]);
          else if (RECURRENT_OF[j] >= 0) d_u[(row * GU + RECURRENT_ONLY_OF[j]) * ROW + cell.element] = scalar(d_g[i][j]);
          add_to(d_bias + (cell.sequence * GATES + j) * ROW + cell.element, d_g[i][j]);
        }
      }
    }
  }
}
