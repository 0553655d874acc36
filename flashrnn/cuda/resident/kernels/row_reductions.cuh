// Reductions over the units of a head within a step, if a row of lanes has all units of a sequence (IN_ROWS).
#pragma once
#include "resident/kernels/cells.cuh"

// Returns the sum of `value` over the lanes of a row. The first sums are by tensor cores, which take half as long as
// shuffles.
DEVICE float row_sum(float value) {
  const float2 of_quads = sum_of_quads(value);
  const float of_two = of_quads.x + of_quads.y;
  if constexpr (ROW_LANES == 32) return sum_of_quads(of_two).x;
  // A warp has several rows; their quads are added separately, so that no row sees the NaN of another.
  const int lane = threadIdx.x % 32, first = lane / 4 * 4 + lane / ROW_LANES * (ROW_LANES / 8);
  float sum = __shfl_sync(~0u, of_two, first);
  if constexpr (ROW_LANES == 16) sum += __shfl_sync(~0u, of_two, first + 1);
  return sum;
}

// Reduces over the units of a head, as UnitReductions::reduce: over the two units of a lane and those of the other
// lanes of its row.
struct RowReductions {
  template <int NUMBER, int SUMS, int MOMENTS, int MAXIMA>
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS], float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    constexpr int MAXIMA_FROM = SUMS + 2 * MOMENTS;
    auto set = [&](int i, int p, float value) { result[i][2 * p] = result[i][2 * p + 1] = value; };
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) set(i, p, row_sum(values[i][2 * p] + values[i][2 * p + 1]));
      // Deviations from one of the values, and their squares, cancel little.
#pragma unroll
      for (int i = SUMS; i < SUMS + MOMENTS; i++) {
        const float shift = __shfl_sync(~0u, values[i][2 * p], threadIdx.x % 32 / ROW_LANES * ROW_LANES);
        const float a = values[i][2 * p] - shift, b = values[i][2 * p + 1] - shift;
        const float deviation = row_sum(a + b) * (1.0f / D), square = row_sum(fmaf(a, a, b * b)) * (1.0f / D);
        set(2 * i - SUMS, p, shift + deviation);
        set(2 * i - SUMS + 1, p, op_max(fmaf(-deviation, deviation, square), 0.0f));
      }
#pragma unroll
      for (int i = SUMS + MOMENTS; i < SUMS + MOMENTS + MAXIMA; i++) {
        float largest = op_max(values[i][2 * p], values[i][2 * p + 1]);
#pragma unroll
        for (int mask = 1; mask < ROW_LANES; mask *= 2) largest = op_max(largest, __shfl_xor_sync(~0u, largest, mask));
        set(i + MOMENTS, p, largest);
      }
    }
  }
};
