// Copies rows, bound by memory bandwidth.
#pragma once
#include "kernels/common.cuh"

constexpr int AT_ONCE = 4;  // loads of a thread in flight

// Params: types and shapes are in gather_rows.py. x, index -> gathered: row i is row index[i] of x or, if that is
// negative, zeros or, if `first`, the first row. Rows have `vectors` vectors of 16 bytes; there are `all` in the
// result, fewer than 2^31.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_gather_rows(PARAMETERS) {
  const Params params{PARAMETER_NAMES};
  const u32 vectors = u32(params.vectors), all = u32(params.all);
  const u32 first = blockIdx.x * (AT_ONCE * BLOCK_THREADS) + threadIdx.x;
  uint4 found[AT_ONCE];
  UNROLL for (int k = 0; k < AT_ONCE; k++) {
    const u32 i = first + k * BLOCK_THREADS, row = i / vectors;
    const i64 given = i < all ? params.index[row] : -1, from = params.first ? max(given, i64(0)) : given;
    found[k] = from < 0 ? make_uint4(0, 0, 0, 0) : params.x[from * vectors + (i - row * vectors)];
  }
  UNROLL for (int k = 0; k < AT_ONCE; k++)
    if (const u32 i = first + k * BLOCK_THREADS; i < all) params.gathered[i] = found[k];
}
