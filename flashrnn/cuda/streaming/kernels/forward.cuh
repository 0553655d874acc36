// The forward time loop with R streamed. The rows of R are those of the recurrent gates of an item's units; the vectors
// are h.
#pragma once
#include "streaming/kernels/stream.cuh"
static_assert(ROWS == GR * UNITS && K == D);

// The inputs of a cell's step, which are read before the recurrent sums are available.
struct StepInput {
  float bias[GATES], x[GI], state[STATES];
  bool carry;  // whether the states before the step are passed on, i.e. not reset
};

// Reads the inputs of step t, and prefetches x of AHEAD steps later.
DEVICE void read_input(StepInput& to, const Params& params, const CellCoord& cell, i64 t) {
  const scalar* x = params.x + cell.row_at(params, t) * GI * ROW + cell.element;
  to.carry = !RESET || !params.reset[cell.sequence * params.T + t];
  UNROLL for (int j = 0; j < GI; j++) {
    to.x[j] = float(x[j * ROW]);
    if (t + AHEAD < params.T) prefetch(x + (AHEAD * params.row_t * GI + j) * ROW);
  }
  UNROLL for (int j = 0; j < GATES; j++) to.bias[j] = params.bias[j * ROW + cell.element];
  UNROLL for (int k = 0; k < STATES; k++)
    to.state[k] = to.carry ? params.state[(k * params.B + cell.sequence) * ROW + cell.element] : 0;
}

// Computes a cell's states after the step, with h rounded as it is exchanged, and its gates as they are stored for the
// backward.
DEVICE void step_forward(float (&fresh)[STATES], UnitGates& stored, const StepInput& in, const float* sums,
                         const CellCoord& cell) {
  float g[GATES];
  UNROLL for (int j = 0; j < GATES; j++) {
    g[j] = assemble_gate<false>(
        j, in.bias[j], in.carry, [&](int k) { return sum_of(sums, cell, k * UNITS + cell.row); },
        [&](int k) { return in.x[k]; });
    to_gate(stored.values[j], g[j]);
  }
  cell_forward(g, in.state, fresh);
  fresh[0] = float(scalar(fresh[0]));
}

// Params: types and shapes are in streaming/parameters.py. x, R in the order of Stream, bias, reset -> h, aux. state:
// the initial states on entry, the last states on return. exchange [2, N, B, PADDED_K]: the initial h, and zeros in all
// other elements. counters [groups, 32]: zeros. gates, with STORE_GATES: the arguments of cell_forward. Row (b, t) of
// x, h, aux and gates is row b * row_b + t * row_t: batch and time may be swapped in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_stream_forward(PARAMETERS) {
  extern __shared__ __align__(16) float sums[];
  const Params params{PARAMETER_NAMES};
  const i64 B = params.B;
  const int items = Item::count(B), first = blockIdx.x;
  Stream stream(params.R, Item(first));
  for (i64 t = 0; t < params.T; t++) {
    const scalar* before = params.exchange + (t & 1) * HEADS * B * PADDED_K;
    scalar* after = params.exchange + (~t & 1) * HEADS * B * PADDED_K;
    for (int index = first; index < items; index += gridDim.x) {
      const Item item(index), next(index + gridDim.x < items ? index + gridDim.x : first);
      StepInput in[CELLS];
      for_each_cell(item, B, [&](int i, const CellCoord& cell) { read_input(in[i], params, cell, t); });
      step_sums(sums, stream, params, item, next, before, t);
      float fresh[CELLS][STATES];
      UnitGates stored[CELLS];
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        step_forward(fresh[i], stored[i], in[i], sums, cell);
        after[cell.exchanged(item, B, 0)] = scalar(fresh[i][0]);
      });
      __syncthreads();
      if (threadIdx.x == 0) signal(params.counters + item.counter);
      for_each_cell(item, B, [&](int i, const CellCoord& cell) {
        const i64 at = cell.row_at(params, t) * ROW + cell.element;
        params.h[at] = scalar(fresh[i][0]);
        if (STORE_GATES) params.gates[at] = stored[i];
        UNROLL for (int k = 0; k < STATES; k++) {
          params.state[(k * B + cell.sequence) * ROW + cell.element] = fresh[i][k];
          if (STORE_AUX && k > 0) to_gate(params.aux[(k - 1) * B * params.T * ROW + at], fresh[i][k]);
        }
      });
    }
  }
}
