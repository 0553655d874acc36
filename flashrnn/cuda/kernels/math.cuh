// The element-wise functions that printed cells call. Errors are absolute, for results of magnitude 1, unless stated
// otherwise.
#pragma once
#include "kernels/common.cuh"

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Half types use single instructions whose errors are below the rounding of their results (2^-9 or 2^-12): tanh has a
// relative error of 2^-11, exp and div of 2^-22; log has an absolute error of 2^-22. float32 has errors of two units in
// the last place. With TF32, whose products have errors of 2^-16, tanh, sigmoid, exp and div are free of branches and
// have relative errors of 2^-20; for |x| > 8, those of exp and sigmoid are |x| 2^-23.
constexpr bool ACCURATE = sizeof(scalar) == 4;

// Uses a polynomial for |x| < 3/8: there, the difference of two numbers near 1 would have an absolute error of 2^-22.
DEVICE float tanh_tf32(float x) {
  const float square = x * x;
  float series = fmaf(square, -0.0484720f, 0.1328940f);
  series = fmaf(square, series, -0.3333232f);
  const float small = fmaf(x * square, series, x);
  const float large = fmaf(-2.0f, reciprocal(1.0f + exp2_fast(x * 2.8853900817779268f)), 1.0f);
  return fabsf(x) < 0.375f ? small : large;
}

DEVICE float op_tanh(float x) {
  if constexpr (TF32) return tanh_tf32(x);
  if constexpr (ACCURATE) return tanhf(x);
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float op_sigmoid(float x) {
  if constexpr (TF32) return reciprocal(1.0f + exp2_fast(x * -1.4426950408889634f));
  if constexpr (ACCURATE) return reciprocal(1.0f + expf(-x));
  return fmaf(op_tanh(0.5f * x), 0.5f, 0.5f);
}
DEVICE float op_exp(float x) { return ACCURATE && !TF32 ? expf(x) : exp2_fast(x * 1.4426950408889634f); }
DEVICE float op_exp2(float x) { return ACCURATE && !TF32 ? exp2f(x) : exp2_fast(x); }
DEVICE float op_log(float x) { return ACCURATE ? logf(x) : log2_fast(x) * 0.6931471805599453f; }
DEVICE float op_log1p(float x) { return ACCURATE ? log1pf(x) : op_log(1.0f + x); }
DEVICE float op_expm1(float x) { return expm1f(x); }
DEVICE float op_div(float a, float b) {
  if constexpr (TF32) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
  return ACCURATE ? a / b : a * reciprocal(b);
}
DEVICE float op_pow(float a, float b) { return powf(a, b); }
DEVICE float op_sqrt(float x) { return sqrtf(x); }
DEVICE float op_rsqrt(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float op_sin(float x) { return ACCURATE ? sinf(x) : __sinf(x); }
DEVICE float op_cos(float x) { return ACCURATE ? cosf(x) : __cosf(x); }
DEVICE float op_atan(float x) { return atanf(x); }
DEVICE float op_erf(float x) { return erff(x); }
DEVICE float op_erfc(float x) { return erfcf(x); }
DEVICE float op_floor(float x) { return floorf(x); }
DEVICE float op_round(float x) { return rintf(x); }
DEVICE float op_fmod(float a, float b) { return fmodf(a, b); }
DEVICE float op_copysign(float a, float b) { return copysignf(a, b); }
DEVICE float op_abs(float x) { return fabsf(x); }
DEVICE float op_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }

// These propagate NaN, as PyTorch's do.
DEVICE float op_max(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
DEVICE float op_min(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
