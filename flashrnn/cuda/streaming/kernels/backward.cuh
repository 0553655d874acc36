// The backward time loop with R streamed. The rows of R are the units of an item; the vectors are the gradients of the
// recurrent gates. The factors of the cell's gradient are computed from the stored gates before the block waits for its
// group.
#pragma once
#include "streaming/kernels/stream.cuh"
static_assert(ROWS == UNITS && K == GR * D);

// The data of a cell's step that do not depend on the sums through R, which are prepared before these are available.
struct StepBack {
  float factors[FACTORS], d_new[STATES];  // d_new: gradients of the states after the step
  bool carry, carry_next;                 // whether the states before and after this step are passed on, i.e. not reset
};

// Returns the value at `from`, which belongs to step t - back_steps, and prefetches that of AHEAD steps earlier. `back`
// is the distance between consecutive steps.
template <class Number>
DEVICE Number read(const Number* from, i64 t, int back_steps, i64 back) {
  if (t >= AHEAD + back_steps) prefetch(from - AHEAD * back);
  return *from;
}

// Reads a cell's gates and its states before step t, computes the factors of its gradient, and adds the gradients of
// the step's results to d_new.
DEVICE void prepare_step(StepBack& to, const Params& params, const CellCoord& cell, i64 t) {
  const i64 at = cell.row_at(params, t) * ROW + cell.element, back = params.row_t * ROW;
  const float* first_state = params.initial + cell.sequence * ROW + cell.element;
  to.carry = !RESET || !params.reset[cell.sequence * params.T + t];
  const UnitGates stored = read(params.gates + at, t, 0, back);
  float g[GATES], s[STATES];
  UNROLL for (int j = 0; j < GATES; j++) g[j] = float(stored.values[j]);
  s[0] = !USES_H || !to.carry ? 0 : t > 0 ? float(read(params.h + at - back, t, 1, back)) : *first_state;
  UNROLL for (int k = 1; k < STATES; k++) {
    const i64 in_aux = (k - 1) * params.B * params.T * ROW + at;
    s[k] = !to.carry
        ? 0 : t > 0 ? float(read(params.aux + in_aux - back, t, 1, back)) : first_state[k * params.B * ROW];
    if (HAS_D_AUX) to.d_new[k] += read(params.d_aux + in_aux, t, 0, back);
  }
  if (params.d_h) to.d_new[0] += float(read(params.d_h + at, t, 0, back));
  cell_factors(g, s, to.factors);
}

// Params as of flashrnn_stream_forward, and: initial; d_h (may be null), d_aux -> d_x, d_u. d_bias [B, GATES, N, D]:
// zeros, to which the gradients of the biases are added in float32. d_state: the gradient of the last states on entry,
// of the initial states on return. exchange [2, N, B, PADDED_K]: zeros.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_backward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const Params params{PARAMETER_NAMES};
  const i64 B = params.B, T = params.T;
  const int items = Item::count(B), first = blockIdx.x;
  Stream stream(params.R, Item(first));
  for (i64 step = 0; step <= T; step++) {
    const i64 t = T - 1 - step;  // -1: the gradient of the initial states
    const scalar* before = params.exchange + (step & 1) * HEADS * B * PADDED_K;
    scalar* after = params.exchange + (~step & 1) * HEADS * B * PADDED_K;
    for (int index = first; index < items; index += gridDim.x) {
      const Item item(index), next(index + gridDim.x < items ? index + gridDim.x : first);
      StepBack cells[CELLS];
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        StepBack& at_cell = cells[i];
        at_cell.carry_next = !RESET || step == 0 || !params.reset[cell.sequence * T + t + 1];
        UNROLL for (int k = 0; k < STATES; k++)
          at_cell.d_new[k] = params.d_state[(k * B + cell.sequence) * ROW + cell.element];
        if (t >= 0) prepare_step(at_cell, params, cell, t);
      });
      step_sums(sums, stream, params, item, next, before, step);
      float d_g[CELLS][GATES], d_old[CELLS][STATES];
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        if (cells[i].carry_next) cells[i].d_new[0] += sum_of(sums, cell, cell.row);
        if (t < 0) return;
        cell_backward(cells[i].factors, cells[i].d_new, d_g[i], d_old[i]);
        UNROLL for (int j = 0; j < GATES; j++)
          if (RECURRENT_OF[j] >= 0) after[cell.exchanged(item, B, RECURRENT_OF[j])] = scalar(d_g[i][j]);
      });
      __syncthreads();
      if (threadIdx.x == 0) signal(params.counters + item.counter);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        UNROLL for (int k = 0; k < STATES; k++)
          params.d_state[(k * B + cell.sequence) * ROW + cell.element] = t < 0
              ? cells[i].d_new[k] : cells[i].carry ? d_old[i][k] : 0;
        if (t >= 0) store_gate_gradients([&](int j) { return d_g[i][j]; }, params, cell, t);
      });
    }
  }
}
