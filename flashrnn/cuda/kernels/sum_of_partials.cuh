// The sum of the partial sums of several blocks, rounded to the result's dtype.
#pragma once
#include "kernels/partial_sums.cuh"

// Params: types and shapes are in sum_of_partials.py. partial -> total, the sum over its first axis.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_sum_of_partials(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const i64 i = i64(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i >= params.pairs) return;
  const float2 sum = sum_of_pair(params.partial, params.partials, params.pairs, i);
  params.total[i].round(sum.x, sum.y);
}
