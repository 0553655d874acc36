// Powers of two by which floats are multiplied before they are split into float16 numbers (SCALED in common.cuh): one
// for each warp's part of R and, for h or the gradients of the gates, one for each sequence, so that no sequence
// depends on others of the batch.
#pragma once
#include "resident/kernels/cells.cuh"

struct Scale {
  float up = 1, down = 1;  // down = 1 / up
  Scale() = default;
  // Scales values of magnitude `largest` to [2^14, 2^15). Then all values of at least 2^-16 `largest` keep the 22 bits
  // of two float16 numbers, and smaller ones have an error of at most 2^-39 `largest`.
  DEVICE explicit Scale(float largest) {
    const u32 exponent = max(__float_as_uint(largest) >> 23, 16u);  // so that both factors are normal numbers
    up = __uint_as_float((268 - exponent) << 23), down = __uint_as_float((exponent - 14) << 23);
  }
};

// The scales of the product's right operand, for each sequence.
struct OperandScale {
  float up[PAIRS];             // for the lane's cells
  float down[BATCH_TILES][2];  // for the columns of its sums
  // largest(sequence) returns the largest magnitude of a sequence.
  template <class Largest>
  DEVICE void set(const ThreadCoord& coord, Largest largest) {
    // Without cells, sequence() may be SEQS or more.
    UNROLL for (int p = 0; p < PAIRS; p++) up[p] = coord.has_cells() ? Scale(largest(coord.sequence(p * PAIR))).up : 1;
    UNROLL for (int n = 0; n < BATCH_TILES; n++)
      UNROLL for (int second = 0; second < 2; second++)
        down[n][second] = Scale(largest(8 * n + 2 * coord.lane_in_quad + second)).down;
  }
};

// Undoes the scaling of both operands in their sums.
template <int M>
DEVICE void scale_down(float (&c)[M][BATCH_TILES][4], const Scale& left, const OperandScale& right) {
  UNROLL for (int n = 0; n < BATCH_TILES; n++)
    UNROLL for (int r = 0; r < 4; r++) {
      const float factor = left.down * right.down[n][r % 2];
      UNROLL for (int m = 0; m < M; m++) c[m][n][r] *= factor;
    }
}

// The largest magnitude of the units of each warp, [CONTRIBUTIONS][SEQS]; in the forward, of all units, [SEQS].
constexpr int MAGNITUDE_BYTES = SCALED ? CONTRIBUTIONS * SEQS * 4 : 0;
