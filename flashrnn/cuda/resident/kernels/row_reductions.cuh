// Reductions over the units of a head within a step, where a row of lanes has all units of a sequence (IN_ROWS).
#pragma once
#include "resident/kernels/cells.cuh"

// Reduces over the two units of a lane and those of the other lanes of its row: sums, then moments (mean and variance), then
// maxima. IN_ROWS, every step's reductions are of this kind.
struct RowReductions {
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&of)[SUMS + MOMENTS + MAXIMA][CELLS], float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    constexpr int MAXIMA_FROM = SUMS + 2 * MOMENTS;
    float all[SUMS + 2 * MOMENTS + MAXIMA][PAIRS];  // of a moment: the sum, and that of the squared deviations from the mean
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) all[i][p] = of[i][2 * p] + of[i][2 * p + 1];
#pragma unroll
      for (int i = 0; i < MOMENTS; i++) {
        const float a = of[SUMS + i][2 * p], b = of[SUMS + i][2 * p + 1];
        all[SUMS + 2 * i][p] = a + b, all[SUMS + 2 * i + 1][p] = (a - b) * (a - b) * 0.5f;
      }
#pragma unroll
      for (int i = 0; i < MAXIMA; i++) all[MAXIMA_FROM + i][p] = op_max(of[SUMS + MOMENTS + i][2 * p], of[SUMS + MOMENTS + i][2 * p + 1]);
    }
#pragma unroll
    for (int mask = 1; mask < ROW_LANES; mask *= 2)
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        auto other = [&](int i) { return __shfl_xor_sync(~0u, all[i][p], mask); };
#pragma unroll
        for (int i = 0; i < SUMS; i++) all[i][p] += other(i);
#pragma unroll
        for (int i = SUMS; i < MAXIMA_FROM; i += 2) {  // of 2 * mask units each (Chan et al., 1979)
          const float sum = other(i), squares = other(i + 1), apart = all[i][p] - sum;
          all[i][p] += sum, all[i + 1][p] = fmaf(apart * apart, 1.0f / (4 * mask), all[i + 1][p] + squares);
        }
#pragma unroll
        for (int i = MAXIMA_FROM; i < MAXIMA_FROM + MAXIMA; i++) all[i][p] = op_max(all[i][p], other(i));
      }
#pragma unroll
    for (int i = 0; i < SUMS + 2 * MOMENTS + MAXIMA; i++)
#pragma unroll
      for (int q = 0; q < CELLS; q++) result[i][q] = all[i][q / 2] * (i >= SUMS && i < MAXIMA_FROM ? 1.0f / D : 1.0f);
  }
};
