// The forward time loop with R streamed, of a cell whose step reduces over units. Otherwise as forward.cuh.
#pragma once
#include "streaming/kernels/reductions.cuh"
static_assert(ROWS == GR * UNITS && K == D);

// PARAMETERS as of forward.cuh, and: parts, of UnitReductions; first_item, that of the launch's first block.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_forward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const Item item(first_item + blockIdx.x);
  Stream stream(R, item);
  UnitReductions units(sums + SUM_FLOATS, parts, counters, item, B);
  for (i64 t = 0; t < T; t++, units.step++) {
    const scalar* before = exchange + (t & 1) * HEADS * B * PADDED_K;
    scalar* after = exchange + (~t & 1) * HEADS * B * PADDED_K;
    float g[GATES][CELLS] = {}, old[STATES][CELLS] = {}, fresh[STATES][CELLS], stored[GATES][CELLS];
    float statistics[STATISTICS > 0 ? STATISTICS : 1][CELLS];
    bool carry[CELLS];
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      const scalar* from = x + (cell.sequence * row_b + t * row_t) * GI * ROW + cell.element;
      carry[i] = !RESET || !reset[cell.sequence * T + t];
#pragma unroll
      for (int j = 0; j < GATES; j++) {
        g[j][i] = bias[j * ROW + cell.element];
        if (INPUT_OF[j] < 0) continue;
        g[j][i] += float(from[INPUT_OF[j] * ROW]);
        if (t + AHEAD < T) prefetch(from + (AHEAD * row_t * GI + INPUT_OF[j]) * ROW);
      }
#pragma unroll
      for (int k = 0; k < STATES; k++) old[k][i] = carry[i] ? state[(k * B + cell.sequence) * ROW + cell.element] : 0;
    });
    auto recurrent_gates = [&](float (&g)[GATES][CELLS]) {
      step_sums(sums, stream, item, item, before, counters, t, B);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
#pragma unroll
        for (int j = 0; j < GATES; j++)
          if (RECURRENT_OF[j] >= 0 && carry[i]) g[j][i] += sum_of(sums, cell, RECURRENT_OF[j] * UNITS + cell.row);
      });
    };
    cells_forward(g, old, recurrent_gates, fresh, statistics, stored, units);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      after[cell.exchanged(item, B, 0)] = scalar(fresh[0][i]);
      fresh[0][i] = float(scalar(fresh[0][i]));
    });
    __syncthreads();
    if (threadIdx.x == 0) signal(counters + item.counter);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      const i64 row = cell.sequence * row_b + t * row_t, at = row * ROW + cell.element;
      h[at] = scalar(fresh[0][i]);
#pragma unroll
      for (int k = 0; k < STATES; k++) {
        state[(k * B + cell.sequence) * ROW + cell.element] = fresh[k][i];
        if (STORE_AUX && k > 0) to_gate(aux[(k - 1) * B * T * ROW + at], fresh[k][i]);
      }
      if (!STORE_GATES) return;
      gate* of_head = gates + (row * HEADS + item.head) * HEAD_NUMBERS;
      const int unit = item.unit0 + cell.row;
#pragma unroll
      for (int j = 0; j < GATES; j++)
        if (STORED_OF[j] >= 0) to_gate(of_head[unit * STORED + STORED_OF[j]], stored[j][i]);
#pragma unroll
      for (int k = 0; k < STATISTICS; k++)
        if (unit == 0) store_statistic(of_head, k, statistics[k][i]);
    });
  }
}
