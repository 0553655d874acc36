// Products of rows and vectors by tensor cores, loaded from memory without rearrangement. Four lanes load 64 bytes of a
// row, 16 bytes each: the order of the summands does not matter as long as both factors have the same.
#pragma once
#include "kernels/common.cuh"

constexpr int VECTOR = 64 / sizeof(scalar);  // elements of 64 bytes, which four lanes load

// c += vectors times rows, over 64 bytes of each. With q = lane / 4, v[m] holds 16 bytes of sequences q and q + 8 of
// tile m, and r[n] holds 16 bytes of row q of tile n. Both hold the same 4 or 8 of the 64 bytes' elements, chosen by
// lane % 4.
template <int SEQ_TILES, int ROW_TILES>
DEVICE void multiply(float (&c)[SEQ_TILES][ROW_TILES][4], const uint4 (&v)[SEQ_TILES][2], const uint4 (&r)[ROW_TILES]) {
  if constexpr (sizeof(scalar) == 2) {
    UNROLL for (int m = 0; m < SEQ_TILES; m++) {
      const u32 first[4] = {v[m][0].x, v[m][1].x, v[m][0].y, v[m][1].y};
      const u32 second[4] = {v[m][0].z, v[m][1].z, v[m][0].w, v[m][1].w};
      UNROLL for (int n = 0; n < ROW_TILES; n++) mma(c[m][n], first, r[n].x, r[n].y);
      UNROLL for (int n = 0; n < ROW_TILES; n++) mma(c[m][n], second, r[n].z, r[n].w);
    }
  } else {
    auto split = [](u32* to, int stride, u32 low, u32 high) {
      PairOf<float> pair{__uint_as_float(low), __uint_as_float(high)};
      UNROLL for (int split = 0; split < SPLITS; split++) to[split * stride] = pair.next_split();
    };
    u32 a[SEQ_TILES][SPLITS][4];
    UNROLL for (int m = 0; m < SEQ_TILES; m++)
      UNROLL for (int half = 0; half < 2; half++) {
        split(&a[m][0][half], 4, v[m][half].x, v[m][half].y);
        split(&a[m][0][half + 2], 4, v[m][half].z, v[m][half].w);
      }
    UNROLL for (int n = 0; n < ROW_TILES; n++) {
      u32 b[SPLITS][2];
      split(&b[0][0], 2, r[n].x, r[n].y);
      split(&b[0][1], 2, r[n].z, r[n].w);
      UNROLL for (int m = 0; m < SEQ_TILES; m++) {
        // Tensor cores truncate their sums. Sums over many vectors are therefore made of rounded additions.
        float sum[4] = {};
        UNROLL for (int order = SPLITS - 1; order >= 0; order--)
          UNROLL for (int split = 0; split <= order; split++)
            mma(sum, a[m][split], b[order - split][0], b[order - split][1]);
        UNROLL for (int i = 0; i < 4; i++) c[m][n][i] += sum[i];
      }
    }
  }
}
