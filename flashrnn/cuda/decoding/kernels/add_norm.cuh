// What lies between the matrix products of a residual block: x += update, and the norm of that. A warp computes a row.
#pragma once
#include "decoding/kernels/rows.cuh"

// PARAMETERS: types and shapes are in add_norm.py. The update is normalized by heads before, unless head_weight is null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
flashrnn_add_norm(PARAMETERS) {
  const i64 first = (i64(blockIdx.x) * WARPS + threadIdx.x / 32) * WIDTH;
  if (first >= M * WIDTH) return;
  Row row, added, norm_weight;
  row.load(x + first);
  added.load(update + first);
  norm_weight.load(weight);
  if (head_weight) {
    Row by;
    by.load(head_weight);
    added.normalize<D>();
    added.multiply_by(by);
  }
  row.add(added);
  row.round();
  row.store(x + first);
  row.normalize<WIDTH>();
  row.multiply_by(norm_weight);
  row.store(normalized + first);
}
