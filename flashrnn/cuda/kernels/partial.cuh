// What some of a head's units contribute to sums, moments (mean and variance) and maxima over all of them.
#pragma once
#include "kernels/math.cuh"

// The numbers of one exchange for one sequence. A moment is a shift, one of the numbers themselves, and the sum of the deviations
// from it and that of their squares: these cancel little, whatever the mean is. Words are in the order sums, deviations and
// squares of every moment, shifts, maxima.
template <int SUMS_, int MOMENTS_, int MAXIMA_>
struct Partial {
  static constexpr int SUMS = SUMS_, MOMENTS = MOMENTS_, MAXIMA = MAXIMA_;
  static constexpr int ADDED = SUMS + 2 * MOMENTS, WORDS = ADDED + MOMENTS + MAXIMA;
  static constexpr int VECTORS = (WORDS + 3) / 4, RESULTS = ADDED + MAXIMA;
  static constexpr int PAIRS = (WORDS + 1) / 2 > MOMENTS + MAXIMA ? (WORDS + 1) / 2 : MOMENTS + MAXIMA;  // published
  float words[4 * VECTORS];

  DEVICE void load(const float* from) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const float4 v = reinterpret_cast<const float4*>(from)[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
  DEVICE void store(float* to) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      reinterpret_cast<float4*>(to)[i] = make_float4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
  // Adds what `units` others contribute.
  DEVICE void add(const Partial& other, float units) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) words[i] += other.words[i];
#pragma unroll
    for (int i = 0; i < MOMENTS; i++) {
      const float deviations = other.words[SUMS + 2 * i], shift = other.words[ADDED + i] - words[ADDED + i];
      words[SUMS + 2 * i] += fmaf(units, shift, deviations);
      words[SUMS + 2 * i + 1] += fmaf(shift, fmaf(units, shift, 2.0f * deviations), other.words[SUMS + 2 * i + 1]);
    }
#pragma unroll
    for (int i = ADDED + MOMENTS; i < WORDS; i++) words[i] = op_max(words[i], other.words[i]);
  }
  // Adds what lanes contribute that differ in bits from LAST on, whose shifts are the same.
  template <int LAST>
  DEVICE void add_lanes() {
#pragma unroll
    for (int mask = 16; mask >= LAST; mask /= 2) {
#pragma unroll
      for (int i = 0; i < ADDED; i++) words[i] += __shfl_xor_sync(~0u, words[i], mask);
#pragma unroll
      for (int i = ADDED + MOMENTS; i < WORDS; i++) words[i] = op_max(words[i], __shfl_xor_sync(~0u, words[i], mask));
    }
  }
  // Adds what all lanes of the warp contribute, this one of `units` units.
  DEVICE void add_lanes(float units) {
    Partial other;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) other.words[i] = __shfl_xor_sync(~0u, words[i], mask);
      const float more = __shfl_xor_sync(~0u, units, mask);
      add(other, more);
      units += more;
    }
  }
  // Return result i over all D units: sums, mean and variance of every moment, maxima.
  DEVICE float result(int i) const {
    if (i >= ADDED) return words[i + MOMENTS];
    if (i < SUMS) return words[i];
    const int moment = (i - SUMS) / 2;
    const float deviation = words[SUMS + 2 * moment] * (1.0f / D), square = words[SUMS + 2 * moment + 1] * (1.0f / D);
    return (i - SUMS) % 2 == 0 ? words[ADDED + moment] + deviation : op_max(fmaf(-deviation, deviation, square), 0.0f);
  }
};
