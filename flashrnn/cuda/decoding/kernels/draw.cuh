// Sampling of a class with the probability given by its logit, as the winner of an exponential race. The random numbers
// are hashes of a sequence's key and of the class, equal to those of models/generation/row_random.py.
#pragma once
#include "kernels/math.cuh"

constexpr u32 NEXT_KEY = 0x9E3779B9u;

// The shift is arithmetic, as that of PyTorch's int32.
DEVICE u32 mix(u32 x, int shift) { return x ^ u32(int(x) >> shift); }

// Returns the score of a class in the race; the largest wins. It is the logit minus the logarithm of an exponentially
// distributed number.
DEVICE float score_of_draw(float logit, u32 key, u32 index) {
  const u32 constant = (index + 1) * 0x2C1B3C6Du & 0x7FFFFFFFu;
  const u32 x = mix(mix(mix(key ^ constant, 16) * 0x7FEB352Du, 15) * 0x846CA68Bu, 16) & 0x7FFFFFFFu;
  const float uniform = (float(x) + 0.5f) * 4.656612873077393e-10f;
  return logit - logf(-log1pf(-uniform));
}

// Maps a float to an unsigned integer of the same order.
DEVICE u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float from_ordered(u32 x) { return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x); }
// Maps a float and an index to an integer of the same order. Among equal floats, the smaller index is larger.
DEVICE u64 ordered(float x, u32 index) { return u64(ordered(x)) << 32 | ~index; }
