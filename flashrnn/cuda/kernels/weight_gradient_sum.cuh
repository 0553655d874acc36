// The sum of what several blocks have of d_R.
#pragma once
#include "common.cuh"

// partial [parts, pairs of numbers] -> d_R, their sum over parts.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
flashrnn_weight_gradient_sum(const float2* __restrict__ partial, u32* __restrict__ d_R, i64 parts, i64 pairs) {
  const i64 i = i64(blockIdx.x) * SUM_THREADS + threadIdx.x;
  if (i >= pairs) return;
  float2 sum = make_float2(0, 0);
#pragma unroll 8
  for (i64 part = 0; part < parts; part++) {
    const float2 more = partial[part * pairs + i];
    sum.x += more.x, sum.y += more.y;
  }
  d_R[i] = pack(sum.x, sum.y);
}
