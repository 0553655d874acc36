// Rows of a tensor made longer or shorter.
#pragma once
#include "kernels/common.cuh"

// Params: types and shapes are in parameters.py. x [rows, from] -> resized [rows, to], with zeros after `from` numbers, or
// without those after `to`. A thread writes 16 bytes of the result, whose rows may begin anywhere.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_resize_rows(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  constexpr int NUMBERS = 16 / BYTES;
  const i64 first = (i64(blockIdx.x) * BLOCK_THREADS + threadIdx.x) * NUMBERS, numbers = params.rows * params.to;
  if (first >= numbers) return;
  i64 row = first / params.to, column = first - row * params.to;
  alignas(16) scalar found[NUMBERS];
#pragma unroll
  for (int i = 0; i < NUMBERS; i++) {
    found[i] = column < params.from && row < params.rows ? params.x[row * params.from + column] : scalar(0.0f);
    if (++column == params.to) column = 0, row++;
  }
  if (first + NUMBERS <= numbers) {
    *reinterpret_cast<uint4*>(params.resized + first) = *reinterpret_cast<const uint4*>(found);
  } else {
#pragma unroll
    for (int i = 0; i < NUMBERS; i++)
      if (first + i < numbers) params.resized[first + i] = found[i];
  }
}
