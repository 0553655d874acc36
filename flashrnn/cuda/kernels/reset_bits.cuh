// Packs a reset mask into words of 32 time steps.
#pragma once
#include "kernels/common.cuh"

// Params: types and shapes are in reset_bits.py. reset, with strides of_b and of_t -> bits: bit k of word w of a
// sequence is step 32 w + k.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_reset_bits(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const i64 words = (params.T + 31) / 32, i = i64(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i >= params.B * words) return;
  const i64 b = i % params.B, w = i / params.B;  // neighbouring threads read neighbours of a time-major mask
  const unsigned char* from = params.reset + b * params.of_b + w * 32 * params.of_t;
  const int steps = int(min(params.T - w * 32, i64(32)));
  u32 word = 0;
  UNROLL for (int k = 0; k < 32; k++)
    if (k < steps && from[k * params.of_t]) word |= 1u << k;
  params.bits[b * words + w] = word;
}
