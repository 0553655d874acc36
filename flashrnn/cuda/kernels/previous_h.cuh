// h before each step, for the kernels that compute d_R. A row is a step of a sequence.
#pragma once
#include "kernels/common.cuh"

// Returns the address of h before row `row` in h [.., N, D]; null stands for zeros. Batch and time may be swapped in
// memory: consecutive steps are row_t rows apart. In the first step, it is the row of sequence() in initial [B, N, D],
// or null.
template <class Row, class Sequence>
DEVICE const scalar* previous_h(const scalar* h, const scalar* initial, Row row, Row row_t, bool first_step,
                                Sequence sequence) {
  if (!first_step) return h + i64(row - row_t) * (HEADS * D);
  return initial ? initial + i64(sequence()) * (HEADS * D) : nullptr;
}

// The previous h of the rows of one head: rows are [B, T], or [T, B] with row_t = B. With BIDIRECTIONAL, the second
// half of the heads goes backwards in time.
struct PreviousRows {
  const scalar *h, *initial;  // at the caller's column
  const unsigned char* reset;
  u32 T, row_t;
  bool backwards;

  // column: the first of the head's columns that the caller reads.
  DEVICE PreviousRows(const Params& params, int head, int column)
      : h(params.h + head * D + column), initial(params.initial ? params.initial + head * D + column : nullptr),
        reset(params.reset),
        T(u32(params.T)), row_t(u32(params.row_t)), backwards(BIDIRECTIONAL && head >= HEADS / 2) {}
  // Returns the address of h before a row; null stands for zeros.
  DEVICE const scalar* operator()(u32 row) const {
    const bool batch_outside = row_t == 1;
    if (RESET && reset[batch_outside ? row : i64(row % row_t) * T + row / row_t]) return nullptr;
    if (backwards) {
      const u32 last = (T - 1) * row_t;
      const bool first_step = batch_outside ? row % T == last : row >= last;
      return previous_h(h, initial, row, -row_t, first_step, [&] { return batch_outside ? row / T : row - last; });
    }
    const bool first_step = batch_outside ? row % T == 0 : row < row_t;
    return previous_h(h, initial, row, row_t, first_step, [&] { return batch_outside ? row / T : row; });
  }
};
