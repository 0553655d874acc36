// The product R h of a forward step: the warps' tiles of R, the initial h as an operand, and a warp's sums.
#pragma once
#include "resident/kernels/forward_memory.cuh"

// Loads this warp's tiles of R: rows are the recurrent gates of its unit tile, and the inner axis is its slice of h.
DEVICE void load_weights(Weights& weights, char* fragments, const scalar* R, const ThreadCoord& coord) {
  weights.load(fragments, R, coord, [&](int i, int row, int column) {
    int gate = i % GR, segment = i / GR / SEGMENT_TILES, unit = coord.tile_unit + row;
    int k =
        unit_at(((segment * K_SLICES + coord.k_slice) * SEGMENT_TILES + i / GR % SEGMENT_TILES) * 16 + column, coord);
    return unit < D && k < D ? R + ((gate * HEADS + coord.head) * D + unit) * D + k : nullptr;
  });
}

// SCALED: computes the scales of h for all steps. No h is larger than 1 or than the initial h, which cells/bounds.py
// has derived from the cell's operations.
DEVICE void scale_of_h(OperandScale& scale, float* magnitudes, const Params& params, const ThreadCoord& coord) {
  for (int n = coord.warp; n < SEQS; n += WARPS) {
    float largest = 1;
    if (coord.has_sequence(n)) {
      const float* h = params.initial + coord.batch_index(n) * ROW + coord.head * D;
#pragma unroll 4
      for (int k = coord.lane; k < D; k += 32) largest = max(largest, fabsf(h[k]));
    }
    largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
    if (coord.lane == 0) magnitudes[n] = largest;
  }
  __syncthreads();
  scale.set(coord, [&](int sequence) { return magnitudes[sequence]; });
}

// Stores the initial h as the product's operand, and zeros in the other buffer, where padding must stay zero.
DEVICE void store_initial_h(char* operand, const float* magnitudes, const Params& params, const ThreadCoord& coord) {
  const i64 words = (params.T + WORD - 1) / WORD;
  for (int i = threadIdx.x; i < PADDED * (PACKED ? 4 : SEQS); i += THREADS) {
    int k = unit_at(i % PADDED, coord), n = i / PADDED;
    const bool inside = k < D && coord.has_sequence(n) && !(RESET && params.resets[coord.batch_index(n) * words] & 1);
    PairOf<float> pair{inside ? params.initial[coord.batch_index(n) * ROW + coord.head * D + k] : 0, 0};
    if (SCALED) pair.multiply(Scale(magnitudes[n]).up);
    for (int split = 0; split < SPLITS; split++) {
      char* to = operand + split_offset(split, PADDED) + operand_offset(i % PADDED, n) * 2;
      *reinterpret_cast<u16*>(to) = static_cast<u16>(pair.next_split());
      *reinterpret_cast<u16*>(to + H_BYTES) = 0;
    }
  }
}

// Returns the address of the lane's row of the first tile of the warp's slice of h, in the operand at address `state`.
DEVICE u32 first_row(u32 state, const ThreadCoord& coord) {
  return state + coord.k_slice * SEGMENT_TILES * OPERAND_COLUMNS * 32 + row_in_operand(coord);
}

// Computes this warp's partial sums of R h over its slice of h. In a cluster, h may still be arriving; otherwise the
// block must have synchronised since it was stored. `row`: see first_row.
DEVICE void multiply(float (&c)[GR][BATCH_TILES][4], const Weights& weights, const OperandScale& h_scale, u32 row,
                     u32 barriers, int t, const ThreadCoord& coord) {
  const int now = t & 1;
  Weights::Queue queue;
  weights.start(queue);
  UNROLL for (int i = 0; i < SEGMENTS; i++) {
    if (CLUSTERED && t > 0) barrier_wait(barriers + (now * SEGMENTS + i) * 8, (t - 1) >> 1 & 1);
    product_of_rows<GR, SEGMENT_TILES, SPLIT_BYTES>(c, weights, queue, i * SEGMENT_TILES * GR,
                                                  row + i * K_SLICES * SEGMENT_TILES * OPERAND_COLUMNS * 32);
  }
  if (PACKED) add_splits(c);
  if (SCALED) scale_down(c, weights.scale, h_scale);
}
