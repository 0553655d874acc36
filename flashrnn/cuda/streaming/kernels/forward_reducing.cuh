// The forward time loop with R streamed, for cells whose step reduces over units. Otherwise as forward.cuh.
#pragma once
#include "streaming/kernels/reductions.cuh"
static_assert(ROWS == GR * UNITS && K == D);

// The inputs and results of a step for the thread's cells. The inputs are read before the recurrent sums are available.
struct StepCells {
  float g[GATES][CELLS] = {}, old[STATES][CELLS] = {}, fresh[STATES][CELLS], stored[GATES][CELLS];
  float statistics[STATISTICS > 0 ? STATISTICS : 1][CELLS];
  bool carry[CELLS];  // whether the states before the step are passed on, i.e. not reset
};

// Reads inputs, biases and states of cell number i, and prefetches the inputs of AHEAD steps later.
DEVICE void read_inputs(StepCells& to, int i, const Params& params, const CellCoord& cell, i64 t) {
  const scalar* from = params.x + cell.row_at(params, t) * GI * ROW + cell.element;
  to.carry[i] = !RESET || !params.reset[cell.sequence * params.T + t];
  UNROLL for (int j = 0; j < GATES; j++) {
    to.g[j][i] = params.bias[j * ROW + cell.element];
    if (INPUT_OF[j] < 0) continue;
    to.g[j][i] += float(from[INPUT_OF[j] * ROW]);
    if (t + AHEAD < params.T) prefetch(from + (AHEAD * params.row_t * GI + INPUT_OF[j]) * ROW);
  }
  UNROLL for (int k = 0; k < STATES; k++)
    to.old[k][i] = to.carry[i] ? params.state[(k * params.B + cell.sequence) * ROW + cell.element] : 0;
}

// Stores the states of cell number i, and what the backward needs.
DEVICE void store_results(const StepCells& cells, int i, const Params& params, const Item& item, const CellCoord& cell,
                          i64 t) {
  const i64 B = params.B, row = cell.row_at(params, t), at = row * ROW + cell.element;
  params.h[at] = scalar(cells.fresh[0][i]);
  UNROLL for (int k = 0; k < STATES; k++) {
    params.state[(k * B + cell.sequence) * ROW + cell.element] = cells.fresh[k][i];
    if (STORE_AUX && k > 0) to_gate(params.aux[(k - 1) * B * params.T * ROW + at], cells.fresh[k][i]);
  }
  if (!STORE_GATES) return;
  gate* head_gates = params.gates + (row * HEADS + item.head) * HEAD_NUMBERS;
  const int unit = item.unit0 + cell.row;
  UNROLL for (int j = 0; j < GATES; j++)
    if (STORED_OF[j] >= 0) to_gate(head_gates[unit * STORED + STORED_OF[j]], cells.stored[j][i]);
  UNROLL for (int k = 0; k < STATISTICS; k++)
    if (unit == 0) store_statistic(head_gates, k, cells.statistics[k][i]);
}

// Params as of forward.cuh, and: parts, for UnitReductions; first_item, the item of the launch's first block.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_forward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const Params params{PARAMETER_NAMES};
  const i64 B = params.B;
  const Item item(params.first_item + blockIdx.x);
  Stream stream(params.R, item);
  UnitReductions units(sums + SUM_FLOATS, params, item);
  for (i64 t = 0; t < params.T; t++, units.step++) {
    const scalar* before = params.exchange + (t & 1) * HEADS * B * PADDED_K;
    scalar* after = params.exchange + (~t & 1) * HEADS * B * PADDED_K;
    StepCells cells;
    for_each_cell(item, B, [&](int i, const CellCoord& cell) { read_inputs(cells, i, params, cell, t); });
    auto recurrent_gates = [&](float (&g)[GATES][CELLS]) {
      step_sums(sums, stream, params, item, item, before, t);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        UNROLL for (int j = 0; j < GATES; j++)
          if (RECURRENT_OF[j] >= 0 && cells.carry[i]) g[j][i] += sum_of(sums, cell, RECURRENT_OF[j] * UNITS + cell.row);
      });
    };
    cells_forward(cells.g, cells.old, recurrent_gates, cells.fresh, cells.statistics, cells.stored, units);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) {
      after[cell.exchanged(item, B, 0)] = scalar(cells.fresh[0][i]);
      cells.fresh[0][i] = float(scalar(cells.fresh[0][i]));
    });
    __syncthreads();
    if (threadIdx.x == 0) signal(params.counters + item.counter);
    for_each_cell(item, B, [&](int i, const CellCoord& cell) { store_results(cells, i, params, item, cell, t); });
  }
}
