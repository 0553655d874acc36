// The contribution of some of a head's units to sums, moments (mean and variance) and maxima over all of them.
#pragma once
#include "kernels/math.cuh"

// The contribution to one exchange, for one sequence. A moment is held as a shift, which is one of the values, the sum
// of the deviations from it and the sum of their squares: little cancels in these, whatever the mean is. `words` has
// the sums, the deviations and squares of each moment, the shifts, then the maxima.
template <int SUMS_, int MOMENTS_, int MAXIMA_>
struct Partial {
  static constexpr int SUMS = SUMS_, MOMENTS = MOMENTS_, MAXIMA = MAXIMA_;
  static constexpr int ADDED = SUMS + 2 * MOMENTS, WORDS = ADDED + MOMENTS + MAXIMA;
  static constexpr int VECTORS = (WORDS + 3) / 4, RESULTS = ADDED + MAXIMA;
  static constexpr int PAIRS = (WORDS + 1) / 2 > MOMENTS + MAXIMA ? (WORDS + 1) / 2 : MOMENTS + MAXIMA;  // published
  float words[4 * VECTORS];

  DEVICE void load(const float* from) {
    UNROLL for (int i = 0; i < VECTORS; i++) {
      const float4 v = reinterpret_cast<const float4*>(from)[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
  DEVICE void store(float* to) const {
    UNROLL for (int i = 0; i < VECTORS; i++)
      reinterpret_cast<float4*>(to)[i] =
          make_float4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
  // Adds the contribution of `units` other units.
  DEVICE void add(const Partial& other, float units) {
    UNROLL for (int i = 0; i < SUMS; i++) words[i] += other.words[i];
    UNROLL for (int i = 0; i < MOMENTS; i++) {
      const float deviations = other.words[SUMS + 2 * i], shift = other.words[ADDED + i] - words[ADDED + i];
      words[SUMS + 2 * i] += fmaf(units, shift, deviations);
      words[SUMS + 2 * i + 1] += fmaf(shift, fmaf(units, shift, 2.0f * deviations), other.words[SUMS + 2 * i + 1]);
    }
    UNROLL for (int i = ADDED + MOMENTS; i < WORDS; i++) words[i] = op_max(words[i], other.words[i]);
  }
  // Adds up the contributions of the lanes whose numbers differ in bits LAST and above. Their shifts must be equal.
  template <int LAST>
  DEVICE void add_lanes() {
    UNROLL for (int mask = 16; mask >= LAST; mask /= 2) {
      UNROLL for (int i = 0; i < ADDED; i++) words[i] += __shfl_xor_sync(~0u, words[i], mask);
      UNROLL for (int i = ADDED + MOMENTS; i < WORDS; i++)
        words[i] = op_max(words[i], __shfl_xor_sync(~0u, words[i], mask));
    }
  }
  // Adds up the contributions of all lanes of the warp; that of this lane comes from `units` units.
  DEVICE void add_lanes(float units) {
    Partial other;
    UNROLL for (int mask = 16; mask > 0; mask /= 2) {
      UNROLL for (int i = 0; i < WORDS; i++) other.words[i] = __shfl_xor_sync(~0u, words[i], mask);
      const float more = __shfl_xor_sync(~0u, units, mask);
      add(other, more);
      units += more;
    }
  }
  // Returns result i over all D units, in the order sums, mean and variance of each moment, maxima.
  DEVICE float result(int i) const {
    if (i >= ADDED) return words[i + MOMENTS];
    if (i < SUMS) return words[i];
    const int moment = (i - SUMS) / 2;
    const float deviation = words[SUMS + 2 * moment] * (1.0f / D), square = words[SUMS + 2 * moment + 1] * (1.0f / D);
    return (i - SUMS) % 2 == 0 ? words[ADDED + moment] + deviation : op_max(fmaf(-deviation, deviation, square), 0.0f);
  }
};
