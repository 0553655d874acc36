// Products of the sequences' vectors and a thread block's tiles of weights.
#pragma once
#include "decoding/kernels/weights.cuh"
#include "kernels/memory.cuh"

constexpr int TILES = (STORED + 3) / 4 * 4;     // tiles whose sums are computed at a time
constexpr int OPERAND_STRIDE = WIDTH + VECTOR;  // a quarter of a warp (two rows of four lanes) reads from all banks
static_assert(MANY ? SEQS == 16 * SEQ_TILES : SEQS == WARPS);

// The part of shared memory for products.
struct alignas(16) Products {
  char chunks[SLOTS * SLOT_BYTES];
  i64 table[BLOCKS * ENTRIES];
  Slots slots;
  u32 before;  // see CountingBarrier
};

// Sets the operand of a product of `vectors` vectors: f(sequence, index) returns 16 bytes of scalars.
template <class F>
DEVICE void load_operand(Operand& operand, int vectors, i64 B, F f) {
  UNROLL for (int i = 0; i < WARP_VECTORS; i++)
    UNROLL for (int half = 0; half < 2; half++) {
      const int sequence = seq_tile() * 16 + half * 8 + threadIdx.x % 32 / 4, vector = i * K_SLICES + k_slice();
      const bool valid = (half == 0 || MANY) && sequence < B && vector < vectors;
      operand[i].values[0][half] = valid
          ? f(sequence, vector * VECTOR + threadIdx.x % 4 * LANE) : make_uint4(0, 0, 0, 0);
    }
}

// Loads as many floats as there are scalars in 16 bytes, and rounds them.
DEVICE uint4 rounded(const float* from) {
  const uint4 low = load_b128(reinterpret_cast<const uint4*>(from));
  if constexpr (BYTES == 4) return low;
  const uint4 high = load_b128(reinterpret_cast<const uint4*>(from + 4));
  auto two = [](u32 a, u32 b) { return pack(__uint_as_float(a), __uint_as_float(b)); };
  return make_uint4(two(low.x, low.y), two(low.z, low.w), two(high.x, high.y), two(high.z, high.w));
}

// INT8: the scales of K tiles of rows, from row `first` on and `step` rows apart, of a matrix of `rows` rows. A lane
// holds those of the two rows of a tile for which it has sums. Otherwise empty.
template <int K>
struct Scales {
  float values[INT8 ? K : 1][2];
  DEVICE Scales(const float* scales, int first, int step, int rows) {
    if constexpr (INT8)
      UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int i = 0; i < 2; i++)
          values[k][i] = scales[min(first + k * step + int(threadIdx.x % 4) * 2 + i, rows - 1)];
  }
  // Multiplies the sums of tile k by their scales.
  DEVICE void apply(Sums& c, int k) const {
    if constexpr (INT8)
      UNROLL for (int i = 0; i < 4; i++) c[0][0][i] *= values[k][i % 2];
  }
};

// Calls f(Number<K>(), first) for this block's tiles begin, begin + STEP, ... of ALL: for K = TILES of them at a time,
// then for the K that remain. A block has one of two numbers of tiles, so K is a compile-time constant: branches
// between products would separate them.
template <int ALL, int STEP, class F>
DEVICE void for_tiles(int begin, F f) {
  constexpr int MOST = (ALL + STEP - 1) / STEP, LEFT = MOST % TILES, OR_LEFT = (MOST - 1) % TILES;
  int first = begin, count = tiles_from(begin, ALL, STEP);
  if constexpr (MOST >= TILES)
#pragma unroll 1
    for (; count >= TILES; count -= TILES, first += TILES * STEP) f(Number<TILES>(), first);
  if constexpr (LEFT > 0)
    if (count == LEFT) f(Number<LEFT>(), first);
  if constexpr (OR_LEFT > 0)
    if (count == OR_LEFT) f(Number<OR_LEFT>(), first);
}
