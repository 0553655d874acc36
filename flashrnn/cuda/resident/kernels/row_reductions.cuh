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
  DEVICE void reduce(const float (&values)[SUMS + MOMENTS + MAXIMA][CELLS],
                     float (&result)[SUMS + 2 * MOMENTS + MAXIMA][CELLS]) const {
    auto set = [&](int i, int p, float value) { result[i][2 * p] = result[i][2 * p + 1] = value; };
    UNROLL for (int p = 0; p < PAIRS; p++) {
      UNROLL for (int i = 0; i < SUMS; i++) set(i, p, row_sum(values[i][2 * p] + values[i][2 * p + 1]));
      // Deviations from one of the values, and their squares, cancel little: no value deviates from the mean by more
      // than sqrt(D) deviations, so that rounding errors do not make the variance negative.
      UNROLL for (int i = SUMS; i < SUMS + MOMENTS; i++) {
        const float shift = __shfl_sync(~0u, values[i][2 * p], threadIdx.x % 32 / ROW_LANES * ROW_LANES);
        const float a = values[i][2 * p] - shift, b = values[i][2 * p + 1] - shift;
        const float deviation = row_sum(a + b) * (1.0f / D), square = row_sum(fmaf(a, a, b * b)) * (1.0f / D);
        set(2 * i - SUMS, p, shift + deviation);
        set(2 * i - SUMS + 1, p, fmaf(-deviation, deviation, square));
      }
      UNROLL for (int i = SUMS + MOMENTS; i < SUMS + MOMENTS + MAXIMA; i++) {
        float largest = op_max(values[i][2 * p], values[i][2 * p + 1]);
        UNROLL for (int mask = 1; mask < ROW_LANES; mask *= 2)
          largest = op_max(largest, __shfl_xor_sync(~0u, largest, mask));
        set(i + MOMENTS, p, largest);
      }
    }
  }
};

// CENTRED: the mean square of the recurrent sums of all gates and units, whose mean is zero (centred_weights.cuh).
// Every lane adds up the squares of its own sums before these are exchanged, its part. So no sum over all lanes of a
// row is needed afterwards.
struct SquareSums {
  // parts that a lane adds up, and loads at once
  static constexpr int OF_LANE = 2 * UNIT_TILES, WIDTH = OF_LANE < 4 ? OF_LANE : 4;
  // floats between sequences, in different banks
  static constexpr int PITCH = 8 * UNIT_TILES + (UNIT_TILES > 1 ? 8 : 0);
  static constexpr int SIZE = SEQS / SPREAD * PITCH * 4;                  // bytes
  struct alignas(WIDTH * 4) Vector {
    float numbers[WIDTH];
  };
  float* const parts;  // [sequences][warps][quads]
  const ThreadCoord& coord;
  // Stores the lane's parts of its sequences, whose sums are c.
  DEVICE void store(const float (&c)[GR][BATCH_TILES][4]) const {
    UNROLL for (int cell = 0; cell < LANE_CELLS; cell += 2) {
      float of_units[2] = {0, 0};
      UNROLL for (int j = 0; j < GR; j++)
        UNROLL for (int odd = 0; odd < 2; odd++) {
          const float sum = c[j][tile_of(cell)][second_of(cell) + 2 * odd];
          of_units[odd] = fmaf(sum, sum, of_units[odd]);
        }
      const int column = tile_of(cell) * 8 + 2 * coord.lane_in_quad + second_of(cell);
      parts[column / SPREAD * PITCH + coord.warp * 8 + coord.quad] = of_units[0] + of_units[1];
    }
  }
  // Returns the mean squares of the lane's sequences. The block must have synchronised since the parts were stored.
  DEVICE void load(float (&mean)[CELLS]) const {
    UNROLL for (int q = 0; q < CELLS; q += 2) {
      const float* from = parts + coord.sequence(q) / SPREAD * PITCH + coord.lane_in_quad * OF_LANE;
      float of_lane[OF_LANE];
      UNROLL for (int i = 0; i < OF_LANE; i += WIDTH) {
        const Vector some = *reinterpret_cast<const Vector*>(from + i);
        UNROLL for (int k = 0; k < WIDTH; k++) of_lane[i + k] = some.numbers[k];
      }
      UNROLL for (int left = OF_LANE / 2; left > 0; left /= 2)
        UNROLL for (int i = 0; i < left; i++) of_lane[i] += of_lane[i + left];
      mean[q] = mean[q + 1] = sum_of_quad(of_lane[0]) * (1.0f / (GR * D));
    }
  }

 private:
  // Returns the sum of `value` over the lane's quad. If a row has a whole warp, it is equal for all quads.
  static DEVICE float sum_of_quad(float value) {
    if constexpr (ROW_LANES == 32) return sum_of_quads(value).x;
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
  }
};
