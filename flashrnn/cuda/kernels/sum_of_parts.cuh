// The sum of what several blocks have added up.
#pragma once
#include "kernels/common.cuh"

DEVICE void round(PairOf<float>& pair, float low, float high) { pair.low = low, pair.high = high; }
template <class S>
DEVICE void round(PairOf<S>& pair, float low, float high) { pair.word = pack(low, high); }

// PARAMETERS: types and shapes are in parameters.py. partial -> total, the sum over parts.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
flashrnn_sum_of_parts(PARAMETERS) {
  const i64 i = i64(blockIdx.x) * SUM_THREADS + threadIdx.x;
  if (i >= pairs) return;
  float2 sum = make_float2(0, 0);
#pragma unroll 8
  for (i64 part = 0; part < parts; part++) {
    const float2 more = partial[part * pairs + i];
    sum.x += more.x, sum.y += more.y;
  }
  round(total[i], sum.x, sum.y);
}
