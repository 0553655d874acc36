// The sum of the partial sums of several blocks.
#pragma once
#include "kernels/common.cuh"

// Returns the sum of pair i over the first axis of partial [partials, pairs].
DEVICE float2 sum_of_pair(const float2* partial, i64 partials, i64 pairs, i64 i) {
  float2 sum = make_float2(0, 0);
#pragma unroll 8
  for (i64 k = 0; k < partials; k++) {
    const float2 more = partial[k * pairs + i];
    sum.x += more.x, sum.y += more.y;
  }
  return sum;
}
