// The backward time loop with R streamed, of a cell whose step reduces over units. Otherwise as backward.cuh.
#pragma once
#include "streaming/kernels/reductions.cuh"
static_assert(ROWS == UNITS && K == GR * D);

// PARAMETERS as of backward.cuh, and: bias, parts, of UnitReductions; first_item, that of the launch's first block.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_backward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const Item item(first_item + blockIdx.x);
  Stream stream(R, item);
  UnitReductions units(sums + SUM_FLOATS, parts, counters, item, B);
  for (i64 step = 0; step <= T; step++, units.step++) {
    const i64 t = T - 1 - step;  // -1: the gradient of the initial states
    const scalar* before = exchange + (step & 1) * HEADS * B * PADDED_K;
    scalar* after = exchange + (~step & 1) * HEADS * B * PADDED_K;
    float g[GATES][CELLS] = {}, s[STATES][CELLS] = {}, d_new[STATES][CELLS] = {}, d_g[GATES][CELLS], d_old[STATES][CELLS];
    float states_after[AFTER > 0 ? AFTER : 1][CELLS] = {}, statistics[STATISTICS_NEEDED > 0 ? STATISTICS_NEEDED : 1][CELLS] = {};
    bool carry[CELLS], carry_next[CELLS];
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      carry_next[i] = !RESET || step == 0 || !reset[cell.sequence * T + t + 1];
#pragma unroll
      for (int k = 0; k < STATES; k++) d_new[k][i] = d_state[(k * B + cell.sequence) * ROW + cell.element];
      if (t < 0) return;
      carry[i] = !RESET || !reset[cell.sequence * T + t];
      const i64 row = cell.sequence * row_b + t * row_t, at = row * ROW + cell.element;
      const gate* of_head = gates + (row * HEADS + item.head) * HEAD_NUMBERS;
#pragma unroll
      for (int j = 0; j < GATES; j++)
        g[j][i] = STORED_OF[j] >= 0 ? float(of_head[(item.unit0 + cell.row) * STORED + STORED_OF[j]]) : bias[j * ROW + cell.element];
#pragma unroll
      for (int k = 0; k < STATISTICS_NEEDED; k++) statistics[k][i] = load_statistic(of_head, k);
      const float* first_state = initial + cell.sequence * ROW + cell.element;
      s[0][i] = !USES_H || !carry[i] ? 0 : t > 0 ? float(h[at - row_t * ROW]) : *first_state;
#pragma unroll
      for (int k = 1; k < STATES; k++) {
        const i64 in_aux = (k - 1) * B * T * ROW + at;
        s[k][i] = !carry[i] ? 0 : t > 0 ? float(aux[in_aux - row_t * ROW]) : first_state[k * B * ROW];
        if (AFTER_OF[k] >= 0) states_after[AFTER_OF[k]][i] = float(aux[in_aux]);
        if (HAS_D_AUX) d_new[k][i] += d_aux[in_aux];
      }
      if (d_h) d_new[0][i] += float(d_h[at]);
    });
    auto cotangents = [&](float (&d_new)[STATES][CELLS]) {
      step_sums(sums, stream, item, item, before, counters, step, B);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        if (carry_next[i]) d_new[0][i] += sum_of(sums, cell, cell.row);
      });
    };
    if (t < 0) cotangents(d_new);
    else cells_backward(g, s, states_after, statistics, d_new, cotangents, d_g, d_old, units);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      if (t < 0) return;
#pragma unroll
      for (int j = 0; j < GATES; j++)
        if (RECURRENT_OF[j] >= 0) after[cell.exchanged(item, B, RECURRENT_OF[j])] = scalar(d_g[j][i]);
    });
    __syncthreads();
    if (threadIdx.x == 0) signal(counters + item.counter);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
#pragma unroll
      for (int k = 0; k < STATES; k++)
        d_state[(k * B + cell.sequence) * ROW + cell.element] = t < 0 ? d_new[k][i] : carry[i] ? d_old[k][i] : 0;
      if (t < 0) return;
      store_gate_gradients([&](int j) { return d_g[j][i]; }, cell.sequence * row_b + t * row_t, cell, d_x, d_u, d_bias);
    });
  }
}
