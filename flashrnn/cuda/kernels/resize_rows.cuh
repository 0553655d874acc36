// Rows of a tensor made longer or shorter.
#pragma once
#include "kernels/common.cuh"

// PARAMETERS: types and shapes are in parameters.py. x [rows, from] -> resized [rows, to], with zeros after `from` numbers, or
// without those after `to`. A thread writes 16 bytes of the result, whose rows may begin anywhere.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_resize_rows(PARAMETERS) {
  constexpr int NUMBERS = 16 / BYTES;
  const i64 first = (i64(blockIdx.x) * BLOCK_THREADS + threadIdx.x) * NUMBERS, numbers = rows * to;
  if (first >= numbers) return;
  i64 row = first / to, column = first - row * to;
  alignas(16) scalar found[NUMBERS];
#pragma unroll
  for (int i = 0; i < NUMBERS; i++) {
    found[i] = column < from && row < rows ? x[row * from + column] : scalar(0.0f);
    if (++column == to) column = 0, row++;
  }
  if (first + NUMBERS <= numbers) {
    *reinterpret_cast<uint4*>(resized + first) = *reinterpret_cast<const uint4*>(found);
  } else {
#pragma unroll
    for (int i = 0; i < NUMBERS; i++)
      if (first + i < numbers) resized[first + i] = found[i];
  }
}
