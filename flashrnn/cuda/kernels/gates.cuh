// The classes of a cell's gates, and how a gate is assembled, in all kernels.
//
// Of GATES gates, GI have an input and GR a recurrent part; GU of these are recurrent-only, without an input. INPUT_OF[j],
// RECURRENT_OF[j] and RECURRENT_ONLY_OF[j] are the index of gate j in its class, or -1. Gradients of gates with an input are
// in d_x, those of recurrent-only gates in d_u; a gate with a bias alone has its gradient in d_bias alone.
#pragma once
#include "kernels/common.cuh"

// Return gate j before its activation: bias, recurrent sum R h and input, as far as the gate has them. recurrent_sum(k) and
// input(k) return those of gate k of their class. If not `carry`, the state before the step is reset, and so R h is zero.
// SUM_HAS_BIAS: the recurrent sum already contains the bias.
template <bool SUM_HAS_BIAS, class Sum, class Input>
DEVICE float assemble_gate(int j, float bias, bool carry, Sum recurrent_sum, Input input) {
  const bool recurrent = RECURRENT_OF[j] >= 0;
  const float sum = recurrent ? recurrent_sum(recurrent ? RECURRENT_OF[j] : 0) : 0;
  float gate = !recurrent ? bias : SUM_HAS_BIAS ? (carry ? sum : bias) : bias + (carry ? sum : 0);
  if (INPUT_OF[j] >= 0) gate += input(INPUT_OF[j] >= 0 ? INPUT_OF[j] : 0);
  return gate;
}

// Of a head's row of gates as they are stored for the backward, which has HEAD_NUMBERS numbers: its statistics (cells/statistics.py), in
// whole vectors of four.
constexpr int STATISTIC_FLOATS = (STATISTICS + 3) / 4 * 4;
static_assert(HEAD_NUMBERS >= D * STORED + STATISTIC_FLOATS * 4 / int(sizeof(gate)));
