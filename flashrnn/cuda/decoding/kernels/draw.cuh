// Drawing a class with the probability that its logit gives it, as the winner of an exponential race: random numbers are hashes of
// a sequence's key and of the class, the same as in models/generation/row_random.py.
#pragma once
#include "kernels/math.cuh"

constexpr u32 NEXT_KEY = 0x9E3779B9u;

// Shifts repeat the sign, as those of PyTorch's int32.
DEVICE u32 mixed(u32 x, int shift) { return x ^ u32(int(x) >> shift); }

// The score of a class, of which the largest wins: the logit less the logarithm of an exponentially distributed number.
DEVICE float score_of_draw(float logit, u32 key, u32 index) {
  const u32 constant = (index + 1) * 0x2C1B3C6Du & 0x7FFFFFFFu;
  const u32 x = mixed(mixed(mixed(key ^ constant, 16) * 0x7FEB352Du, 15) * 0x846CA68Bu, 16) & 0x7FFFFFFFu;
  const float uniform = (float(x) + 0.5f) * 4.656612873077393e-10f;
  return logit - logf(-log1pf(-uniform));
}

// A float as a number of the same order.
DEVICE u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float from_ordered(u32 x) { return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x); }
// A float, and an index of which the smaller is preferred, as a number of the same order.
DEVICE u64 ordered(float x, u32 index) { return u64(ordered(x)) << 32 | ~index; }
