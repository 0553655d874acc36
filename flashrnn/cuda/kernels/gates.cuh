// The classes of a cell's gates, and the assembly of a gate from its parts.
//
// Of the GATES gates, GI have an input and GR a recurrent part. The GU recurrent-only gates have a recurrent part and
// no input. INPUT_OF[j], RECURRENT_OF[j] and RECURRENT_ONLY_OF[j] are the index of gate j in these classes, or -1. The
// gradients of gates with an input are in d_x, those of recurrent-only gates in d_u; a gate that is a bias alone has a
// gradient in d_bias only.
#pragma once
#include "kernels/common.cuh"

// Returns gate j before its activation: the sum of its bias, recurrent part (R h) and input, as far as it has them.
// recurrent_sum(k) and input(k) return the parts of gate number k of their class. If not `carry`, the state before the
// step is reset, so R h is zero. SUM_HAS_BIAS: the recurrent sum already includes the bias.
template <bool SUM_HAS_BIAS, class Sum, class Input>
DEVICE float assemble_gate(int j, float bias, bool carry, Sum recurrent_sum, Input input) {
  const bool recurrent = RECURRENT_OF[j] >= 0;
  const float sum = recurrent ? recurrent_sum(recurrent ? RECURRENT_OF[j] : 0) : 0;
  float gate = !recurrent ? bias : SUM_HAS_BIAS ? (carry ? sum : bias) : bias + (carry ? sum : 0);
  if (INPUT_OF[j] >= 0) gate += input(INPUT_OF[j] >= 0 ? INPUT_OF[j] : 0);
  return gate;
}

// Floats that a head's statistics (cells/statistics.py) take in its row of HEAD_NUMBERS stored gates: whole vectors of
// four.
constexpr int STATISTIC_FLOATS = (STATISTICS + 3) / 4 * 4;
static_assert(HEAD_NUMBERS >= D * STORED + STATISTIC_FLOATS * 4 / int(sizeof(gate)));
