// Rows of WIDTH numbers in registers. Of each 128 numbers, lane l of a warp holds 4l to 4l + 3.
#pragma once
#include "kernels/math.cuh"

constexpr int WIDTH = HEADS * D;
constexpr int ROW_LOADS = (WIDTH + 127) / 128;
constexpr float EPSILON = 1e-5f;  // the epsilon of all norms

DEVICE void load_four(float (&v)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
template <class S>
DEVICE void load_four(float (&v)[4], const S* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  const float2 low = unpack(words.x), high = unpack(words.y);
  v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}
DEVICE void store_four(float* to, const float (&v)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}
template <class S>
DEVICE void store_four(S* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// The default `join` of RowOf::normalize, for rows that a warp holds completely.
struct NoJoin {};

// WHOLE: a warp holds the whole row. Otherwise, each warp holds 128 numbers of it, and warps beyond its end hold none.
template <bool WHOLE>
struct RowOf {
  static constexpr int LOADS = WHOLE ? ROW_LOADS : 1;
  float values[LOADS][4] = {};

  // Returns the index in the row of the first of the lane's numbers values[i].
  DEVICE static int place(int i) { return ((WHOLE ? i : threadIdx.x / 32) * 32 + threadIdx.x % 32) * 4; }
  // Calls f(numbers, index of the first) for each four numbers that the lane holds.
  template <class F>
  DEVICE void for_each(F f) {
    UNROLL for (int i = 0; i < LOADS; i++)
      if (WHOLE && WIDTH % 128 == 0 || place(i) < WIDTH) f(values[i], place(i));
  }
  template <class S>
  DEVICE void load(const S* from) {
    for_each([&](float (&v)[4], int at) { load_four(v, from + at); });
  }
  template <class S>
  DEVICE void store(S* to) {
    for_each([&](float (&v)[4], int at) { store_four(to + at, v); });
  }
  // Normalises each SIZE consecutive numbers: subtracts their mean and divides by their standard deviation. If K warps
  // hold parts of these numbers, all warps call join.over<K>(mean, squares), which combines the means and sums of
  // squares of the parts.
  template <int SIZE, class Join = NoJoin>
  DEVICE void normalize(Join join = {}) {
    constexpr int LANES = SIZE % 128 == 0 ? 32 : SIZE / 4, OF_LANE = WHOLE && SIZE % 128 == 0 ? SIZE / 128 : 1;
    static_assert((LANES & (LANES - 1)) == 0 && LANES <= 32);
    UNROLL for (int first = 0; first < LOADS; first += OF_LANE) {
      float sum = 0, squares = 0, count = 4 * OF_LANE;
      auto each_four = [&](auto f) {
        UNROLL for (int i = 0; i < OF_LANE; i++) f(values[first + i]);
      };
      each_four([&](float (&v)[4]) { sum += (v[0] + v[1]) + (v[2] + v[3]); });
      float mean = sum / count;
      each_four([&](float (&v)[4]) {
        const float d[4] = {v[0] - mean, v[1] - mean, v[2] - mean, v[3] - mean};
        squares += (d[0] * d[0] + d[1] * d[1]) + (d[2] * d[2] + d[3] * d[3]);
      });
      // Sums of squares of two parts by Chan, Golub and LeVeque.
      UNROLL for (int other = 1; other < LANES; other *= 2) {
        const float difference = __shfl_xor_sync(0xffffffffu, mean, other) - mean;
        squares += __shfl_xor_sync(0xffffffffu, squares, other) + difference * difference * (0.5f * count);
        mean += 0.5f * difference, count *= 2;
      }
      if constexpr (!WHOLE && SIZE > 128) join.template over<SIZE / 128>(mean, squares);
      const float scale = op_rsqrt(squares / SIZE + EPSILON);
      each_four([&](float (&v)[4]) {
        UNROLL for (int k = 0; k < 4; k++) v[k] = (v[k] - mean) * scale;
      });
    }
  }
  DEVICE void multiply_by(RowOf& other) {
    UNROLL for (int i = 0; i < LOADS; i++)
      UNROLL for (int k = 0; k < 4; k++) values[i][k] *= other.values[i][k];
  }
  DEVICE void round() {
    UNROLL for (int i = 0; i < LOADS; i++)
      UNROLL for (int k = 0; k < 4; k++) values[i][k] = float(scalar(values[i][k]));
  }
  DEVICE void add(RowOf& other) {
    UNROLL for (int i = 0; i < LOADS; i++)
      UNROLL for (int k = 0; k < 4; k++) values[i][k] += other.values[i][k];
  }
};
using Row = RowOf<true>;
