// The forward time loop with R streamed: rows are the recurrent gates of an item's units, vectors are h.
#pragma once
#include "streaming/kernels/stream.cuh"
static_assert(ROWS == GR * UNITS && K == D);

// PARAMETERS: types and shapes are in parameters.py. x, R in the order of Stream, bias, reset -> h, aux. state: the initial
// states, at the end the last ones. exchange [2, N, B, PADDED_K]: h before the first step, and zeros as padding.
// counters [groups, 32]: zeros. gates, if STORE_GATES: the arguments of cell_forward.
// Row (b, t) of x, h, aux and gates is row b * row_b + t * row_t: batch and time may be swapped in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_forward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const int items = Item::count(B), first = blockIdx.x;
  Stream stream(R, Item(first));
  for (i64 t = 0; t < T; t++) {
    const scalar* before = exchange + (t & 1) * HEADS * B * PADDED_K;
    scalar* after = exchange + (~t & 1) * HEADS * B * PADDED_K;
    for (int index = first; index < items; index += gridDim.x) {
      const Item item(index), next(index + gridDim.x < items ? index + gridDim.x : first);
      float b[CELLS][GATES], in[CELLS][GI], s[CELLS][STATES];
      bool carry[CELLS];
#pragma unroll
      for (int i = 0; i < CELLS; i++) {
        const CellCoord cell(item, i, B);
        if (!cell.valid) continue;
        const scalar* from = x + (cell.sequence * row_b + t * row_t) * GI * ROW + cell.element;
        carry[i] = !RESET || !reset[cell.sequence * T + t];
#pragma unroll
        for (int j = 0; j < GI; j++) {
          in[i][j] = float(from[j * ROW]);
          if (t + AHEAD < T) prefetch(from + (AHEAD * row_t * GI + j) * ROW);
        }
#pragma unroll
        for (int j = 0; j < GATES; j++) b[i][j] = bias[j * ROW + cell.element];
#pragma unroll
        for (int k = 0; k < STATES; k++) s[i][k] = carry[i] ? state[(k * B + cell.sequence) * ROW + cell.element] : 0;
      }
      step_sums(sums, stream, item, next, before, counters, t, B);
      float fresh[CELLS][STATES];
      UnitGates seen[CELLS];
#pragma unroll
      for (int i = 0; i < CELLS; i++) {
        const CellCoord cell(item, i, B);
        if (!cell.valid) continue;
        float g[GATES];
#pragma unroll
        for (int j = 0; j < GATES; j++) {
          g[j] = assemble_gate<false>(
              j, b[i][j], carry[i], [&](int k) { return sum_of(sums, cell, k * UNITS + cell.row); }, [&](int k) { return in[i][k]; });
          to_gate(seen[i].of[j], g[j]);
        }
        cell_forward(g, s[i], fresh[i]);
        const scalar rounded = scalar(fresh[i][0]);
        fresh[i][0] = float(rounded);
        after[cell.exchanged(item, B, 0)] = rounded;
      }
      __syncthreads();
      if (threadIdx.x == 0) signal(counters + item.counter);
#pragma unroll
      for (int i = 0; i < CELLS; i++) {
        const CellCoord cell(item, i, B);
        if (!cell.valid) continue;
        const i64 at = (cell.sequence * row_b + t * row_t) * ROW + cell.element;
        h[at] = scalar(fresh[i][0]);
        if (STORE_GATES) gates[at] = seen[i];
#pragma unroll
        for (int k = 0; k < STATES; k++) {
          state[(k * B + cell.sequence) * ROW + cell.element] = fresh[i][k];
          if (STORE_AUX && k > 0) to_gate(aux[(k - 1) * B * T * ROW + at], fresh[i][k]);
        }
      }
    }
  }
}
