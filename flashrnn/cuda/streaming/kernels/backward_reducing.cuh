// The backward time loop with R streamed, for cells whose step reduces over units. Otherwise as backward.cuh.
#pragma once
#include "streaming/kernels/reductions.cuh"
static_assert(ROWS == UNITS && K == GR * D);

// The inputs and results of a step for the thread's cells. The inputs are read before the sums through R are available.
struct StepCells {
  float g[GATES][CELLS] = {}, s[STATES][CELLS] = {}, d_new[STATES][CELLS] = {}, d_g[GATES][CELLS], d_old[STATES][CELLS];
  float states_after[AFTER > 0 ? AFTER : 1][CELLS] = {};
  float statistics[STATISTICS_NEEDED > 0 ? STATISTICS_NEEDED : 1][CELLS] = {};
  bool carry[CELLS], carry_next[CELLS];  // whether the states before and after this step are passed on, i.e. not reset
};

// Reads gates, statistics and states of cell number i, and adds the gradients of the step's results to d_new.
DEVICE void prepare_step(StepCells& to, int i, const Params& params, const Item& item, const CellCoord& cell, i64 t) {
  const i64 B = params.B, row = cell.row_at(params, t), at = row * ROW + cell.element;
  to.carry[i] = !RESET || !params.reset[cell.sequence * params.T + t];
  const gate* head_gates = params.gates + (row * HEADS + item.head) * HEAD_NUMBERS;
  UNROLL for (int j = 0; j < GATES; j++)
    to.g[j][i] = STORED_OF[j] >= 0
        ? float(head_gates[(item.unit0 + cell.row) * STORED + STORED_OF[j]]) : params.bias[j * ROW + cell.element];
  UNROLL for (int k = 0; k < STATISTICS_NEEDED; k++) to.statistics[k][i] = load_statistic(head_gates, k);
  const float* first_state = params.initial + cell.sequence * ROW + cell.element;
  to.s[0][i] = !USES_H || !to.carry[i] ? 0 : t > 0 ? float(params.h[at - params.row_t * ROW]) : *first_state;
  UNROLL for (int k = 1; k < STATES; k++) {
    const i64 in_aux = (k - 1) * B * params.T * ROW + at;
    to.s[k][i] = !to.carry[i] ? 0 : t > 0 ? float(params.aux[in_aux - params.row_t * ROW]) : first_state[k * B * ROW];
    if (AFTER_OF[k] >= 0) to.states_after[AFTER_OF[k]][i] = float(params.aux[in_aux]);
    if (HAS_D_AUX) to.d_new[k][i] += params.d_aux[in_aux];
  }
  if (params.d_h) to.d_new[0][i] += float(params.d_h[at]);
}

// Params as of backward.cuh, and: bias; parts, for UnitReductions; first_item, the item of the launch's first block.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_backward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const Params params{PARAMETER_NAMES};
  const i64 B = params.B, T = params.T;
  const Item item(params.first_item + blockIdx.x);
  Stream stream(params.R, item);
  UnitReductions units(sums + SUM_FLOATS, params, item);
  for (i64 step = 0; step <= T; step++, units.step++) {
    const i64 t = T - 1 - step;  // -1: the gradient of the initial states
    const scalar* before = params.exchange + (step & 1) * HEADS * B * PADDED_K;
    scalar* after = params.exchange + (~step & 1) * HEADS * B * PADDED_K;
    StepCells cells;
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      cells.carry_next[i] = !RESET || step == 0 || !params.reset[cell.sequence * T + t + 1];
      UNROLL for (int k = 0; k < STATES; k++)
        cells.d_new[k][i] = params.d_state[(k * B + cell.sequence) * ROW + cell.element];
      if (t >= 0) prepare_step(cells, i, params, item, cell, t);
    });
    auto cotangents = [&](float (&d_new)[STATES][CELLS]) {
      step_sums(sums, stream, params, item, item, before, step);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        if (cells.carry_next[i]) d_new[0][i] += sum_of(sums, cell, cell.row);
      });
    };
    if (t < 0) cotangents(cells.d_new);
    else
      cells_backward(cells.g, cells.s, cells.states_after, cells.statistics, cells.d_new, cotangents, cells.d_g,
                     cells.d_old, units);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      if (t < 0) return;
      UNROLL for (int j = 0; j < GATES; j++)
        if (RECURRENT_OF[j] >= 0) after[cell.exchanged(item, B, RECURRENT_OF[j])] = scalar(cells.d_g[j][i]);
    });
    __syncthreads();
    if (threadIdx.x == 0) signal(params.counters + item.counter);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      UNROLL for (int k = 0; k < STATES; k++)
        params.d_state[(k * B + cell.sequence) * ROW + cell.element] = t < 0
            ? cells.d_new[k][i] : cells.carry[i] ? cells.d_old[k][i] : 0;
      if (t >= 0) store_gate_gradients([&](int j) { return cells.d_g[j][i]; }, params, cell, t);
    });
  }
}
