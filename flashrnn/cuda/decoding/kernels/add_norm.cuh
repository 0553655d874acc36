// The operations between the matrix products of a residual block: x += update, and the norm of the result. Each warp
// computes one row.
#pragma once
#include "decoding/kernels/rows.cuh"

// Params: types and shapes are in add_norm.py. x and update -> x (in place), normalized. Unless head_weight is null,
// the update is normalised by heads first.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
flashrnn_add_norm(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const i64 first = (i64(blockIdx.x) * WARPS + threadIdx.x / 32) * WIDTH;
  if (first >= params.M * WIDTH) return;
  Row row, added, norm_weight;
  row.load(params.x + first);
  added.load(params.update + first);
  norm_weight.load(params.weight);
  if (params.head_weight) {
    Row by;
    by.load(params.head_weight);
    added.normalize<D>();
    added.multiply_by(by);
  }
  row.add(added);
  row.round();
  row.store(params.x + first);
  row.normalize<WIDTH>();
  row.multiply_by(norm_weight);
  row.store(params.normalized + first);
}
