// Products of all sequences' vectors and the tiles of a block of threads: a warp multiplies a part of each row, and the sums of
// all warps are added up through shared memory.
#pragma once
#include "decoding/kernels/weights.cuh"

constexpr int TILES = (GATES + 3) / 4 * 4;      // whose sums are in shared memory at a time
constexpr int TILES_AT_ONCE = SEQ_TILES == 1 ? TILES : 1;  // whose sums are in registers
constexpr int OPERAND_STRIDE = WIDTH + VECTOR;  // lets a quarter of a warp, two rows of four lanes, read from all banks
constexpr int WARP_SEQS = (SEQS + WARPS - 1) / WARPS;
// Slices of the hidden layer that are loaded at once: as many as registers hold.
constexpr int SLICES_AT_ONCE = WARP_VECTORS * SEQS <= 24 ? SLICES < 4 ? SLICES : 4 : SLICES < 2 ? 1 : 2;
static_assert(SEQS == 8 || SEQS == 16 * SEQ_TILES);

// The shared memory of products.
struct alignas(16) Products {
  char slots[SLOTS * SLOT_BYTES];
  float sums[WARPS][SEQS][TILES][8];  // of tile k of a sequence at place(k, sequence)
  i64 table[BLOCKS * ENTRIES];
  u64 barriers[SLOTS];
  // So that a warp reads sums of four tiles, or of four sequences, and writes those of eight sequences, from all banks.
  DEVICE static int place(int tile, int sequence) { return tile ^ sequence & 3; }
};

// Calls f(sequence, n) for each sequence of the warp, number n of WARP_SEQS.
template <class F>
DEVICE void for_each_sequence(i64 B, F f) {
#pragma unroll
  for (int n = 0; n < WARP_SEQS; n++) {
    const int sequence = n * WARPS + threadIdx.x / 32;
    if (sequence < B) f(sequence, n);
  }
}

// Sets the operand of a product with `vectors` vectors to f(sequence, place of 16 bytes of scalars).
template <class F>
DEVICE void load_operand(Operand& operand, int vectors, i64 B, F f) {
#pragma unroll
  for (int i = 0; i < WARP_VECTORS; i++)
#pragma unroll
    for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int sequence = m * 16 + half * 8 + threadIdx.x % 32 / 4, vector = i * WARPS + threadIdx.x / 32;
        const bool valid = (half == 0 || SEQS > 8) && sequence < B && vector < vectors;
        operand[i][m][half] = valid ? f(sequence, vector * VECTOR + threadIdx.x % 4 * LANE) : make_uint4(0, 0, 0, 0);
      }
}

// Rounds as many floats as there are scalars in 16 bytes.
DEVICE uint4 rounded(const float* from) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  if constexpr (BYTES == 4) {
    return make_uint4(__float_as_uint(low.x), __float_as_uint(low.y), __float_as_uint(low.z), __float_as_uint(low.w));
  } else {
    const float4 high = *reinterpret_cast<const float4*>(from + 4);
    return make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w));
  }
}

// Stores this warp's sums or, with ADDS, adds them to those that it has stored.
template <bool ADDS = false>
DEVICE void store_sums(Products& shared, int tile, const Sums& c) {
  const int quad = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < SEQ_TILES; m++)
#pragma unroll
    for (int half = 0; half < (SEQS > 8 ? 2 : 1); half++) {
      const int sequence = m * 16 + half * 8 + quad;
      auto& at = reinterpret_cast<float2&>(shared.sums[threadIdx.x / 32][sequence][shared.place(tile, sequence)][column]);
      const float2 before = ADDS ? at : make_float2(0, 0);
      at = make_float2(before.x + c[m][0][2 * half], before.y + c[m][0][2 * half + 1]);
    }
}
DEVICE float sum_of_warps(const Products& shared, int tile, int sequence, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += shared.sums[warp][sequence][shared.place(tile, sequence)][row];
  return sum;
}

// Multiplies the operand by this block's tiles, begin, begin + STEP, ..., of a matrix of `tiles` tiles, and calls f(sequence, n,
// row, sum) for each result, n as in for_each_sequence, by all lanes of a warp at once; f has to leave out rows beyond the matrix.
template <int STEP = GRID, class F>
DEVICE void multiply_rows(Products& shared, Weights& weights, const Operand& operand, int begin, int tiles, i64 B, F f) {
#pragma unroll 1
  for (int first = begin; first < tiles; first += TILES * STEP) {
    if (first != begin) weights.refill();
    const int count = tiles_from(first, tiles, STEP);
    each<TILES / TILES_AT_ONCE>([&](auto group) {
      Sums c[TILES_AT_ONCE] = {};
      weights.multiply<TILES_AT_ONCE>([&](auto k) -> Sums& { return c[k]; }, [&](int) -> const Operand& { return operand; }, VECTORS,
                                      count - group * TILES_AT_ONCE);
      if (group == 0 && first != begin) __syncthreads();  // all threads have read the previous sums
#pragma unroll
      for (int k = 0; k < TILES_AT_ONCE; k++) store_sums(shared, group * TILES_AT_ONCE + k, c[k]);
    });
    __syncthreads();
    for_each_sequence(B, [&](int sequence, int n) {
      for (int i = threadIdx.x % 32; i < TILES * 8; i += 32)
        f(sequence, n, (first + i / 8 * STEP) * 8 + i % 8, sum_of_warps(shared, i / 8, sequence, i % 8));
    });
  }
}
