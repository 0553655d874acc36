// The sum of the partial sums of several blocks.
#pragma once
#include "kernels/common.cuh"

DEVICE void round(PairOf<float>& pair, float low, float high) { pair.low = low, pair.high = high; }
template <class S>
DEVICE void round(PairOf<S>& pair, float low, float high) { pair.word = pack(low, high); }

// Params: types and shapes are in parameters.py. partial -> total, the sum over its first axis.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_sum_of_partials(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const i64 i = i64(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i >= params.pairs) return;
  float2 sum = make_float2(0, 0);
#pragma unroll 8
  for (i64 k = 0; k < params.partials; k++) {
    const float2 more = params.partial[k * params.pairs + i];
    sum.x += more.x, sum.y += more.y;
  }
  round(params.total[i], sum.x, sum.y);
}
