// The forward time loop with R streamed: rows are the recurrent gates of an item's units, vectors are h.
#pragma once
#include "streaming/kernels/stream.cuh"
static_assert(ROWS == GR * UNITS && K == D);

// What a cell's step takes besides the recurrent sums, read before these are there.
struct StepInput {
  float bias[GATES], x[GI], state[STATES];
  bool carry;  // whether the states before the step enter it
};

// Reads it. `x`: of the cell's first gate at step t. Prefetches that of AHEAD steps later.
DEVICE void read_input(StepInput& to, const CellCoord& cell, const scalar* x, i64 t, i64 row_t, i64 T, const float* bias,
                       const float* state, i64 B) {
#pragma unroll
  for (int j = 0; j < GI; j++) {
    to.x[j] = float(x[j * ROW]);
    if (t + AHEAD < T) prefetch(x + (AHEAD * row_t * GI + j) * ROW);
  }
#pragma unroll
  for (int j = 0; j < GATES; j++) to.bias[j] = bias[j * ROW + cell.element];
#pragma unroll
  for (int k = 0; k < STATES; k++) to.state[k] = to.carry ? state[(k * B + cell.sequence) * ROW + cell.element] : 0;
}

// Computes a cell's states after the step, h rounded as it is exchanged, and its gates as they are stored for the backward.
DEVICE void step_forward(float (&fresh)[STATES], UnitGates& stored, const StepInput& in, const float* sums, const CellCoord& cell) {
  float g[GATES];
#pragma unroll
  for (int j = 0; j < GATES; j++) {
    g[j] = assemble_gate<false>(
        j, in.bias[j], in.carry, [&](int k) { return sum_of(sums, cell, k * UNITS + cell.row); }, [&](int k) { return in.x[k]; });
    to_gate(stored.of[j], g[j]);
  }
  cell_forward(g, in.state, fresh);
  fresh[0] = float(scalar(fresh[0]));
}

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
      StepInput in[CELLS];
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        const scalar* from = x + (cell.sequence * row_b + t * row_t) * GI * ROW + cell.element;
        in[i].carry = !RESET || !reset[cell.sequence * T + t];
        read_input(in[i], cell, from, t, row_t, T, bias, state, B);
      });
      step_sums(sums, stream, item, next, before, counters, t, B);
      float fresh[CELLS][STATES];
      UnitGates stored[CELLS];
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        step_forward(fresh[i], stored[i], in[i], sums, cell);
        after[cell.exchanged(item, B, 0)] = scalar(fresh[i][0]);
      });
      __syncthreads();
      if (threadIdx.x == 0) signal(counters + item.counter);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        const i64 at = (cell.sequence * row_b + t * row_t) * ROW + cell.element;
        h[at] = scalar(fresh[i][0]);
        if (STORE_GATES) gates[at] = stored[i];
#pragma unroll
        for (int k = 0; k < STATES; k++) {
          state[(k * B + cell.sequence) * ROW + cell.element] = fresh[i][k];
          if (STORE_AUX && k > 0) to_gate(aux[(k - 1) * B * T * ROW + at], fresh[i][k]);
        }
      });
    }
  }
}
