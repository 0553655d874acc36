// h before a step, for the kernels of d_R, in which a row is a step of a sequence.
#pragma once
#include "kernels/common.cuh"

// Return h [.., N, D] before row `row` of the sequence sequence(); null for zeros. Batch and time may be swapped in memory:
// steps are row_t rows apart. initial [B, N, D] or null.
template <class Row, class Sequence>
DEVICE const scalar* previous_h(const scalar* h, const scalar* initial, Row row, Row row_t, bool first_step, Sequence sequence) {
  if (!first_step) return h + i64(row - row_t) * (HEADS * D);
  return initial ? initial + i64(sequence()) * (HEADS * D) : nullptr;
}
