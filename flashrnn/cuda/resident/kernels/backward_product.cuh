// The product of a backward step, R^T times the gradients of the gates: the warps' tiles of R, the gradients as an
// operand, and the exchange of the sums between warps and blocks.
#pragma once
#include "resident/kernels/reduce_scatter.cuh"

// Return the warp's slice of the inner axis, and its first tile of units of the head.
DEVICE int slice(const ThreadCoord& coord) { return BLOCKS > 1 ? 0 : ALL_TILES ? coord.warp : coord.k_slice; }
DEVICE int first_tile(const ThreadCoord& coord) {
  return BLOCKS > 1 ? coord.warp * M_TILES : ALL_TILES ? 0 : coord.unit_tile;
}

// Loads this warp's tiles of R, transposed: rows are units of h, and the inner axis is the gates of this block's units.
DEVICE void load_weights(Weights& weights, char* fragments, const scalar* R, const ThreadCoord& coord) {
  weights.load(fragments, R, coord, [&](int i, int row, int column) {
    int in_chunk = i % (M_CHUNK * K_TILES), m = i / (M_CHUNK * K_TILES) * M_CHUNK + in_chunk % M_CHUNK;
    int k = slice(coord) * K_TILES * 16 + in_chunk / M_CHUNK * 16 + row, from = coord.rank * UNITS + k % UNITS;
    int to = (first_tile(coord) + m) * 16 + column;
    return from < D && to < D ? R + ((k / UNITS * HEADS + coord.head) * D + from) * D + to : nullptr;
  });
}

// Clears buffers that are read without having been written.
DEVICE void clear_operands(char* gates, u32* receive_buffer, float* magnitudes) {
  for (int i = threadIdx.x; i < GATE_BYTES / 2; i += THREADS)  // both buffers: nothing follows the last time step
    reinterpret_cast<u32*>(gates)[i] = 0;
  if (HAS_UNUSED_COLUMNS)  // the columns that no block sends
    for (int i = threadIdx.x; i < RECEIVE_BYTES / 2; i += THREADS) receive_buffer[i] = 0;
  for (int i = threadIdx.x; i < MAGNITUDE_BYTES / 4; i += THREADS) magnitudes[i] = 0;
}

// The buffers and mbarriers of the reduce-scatter.
struct Exchange {
  u32* receive_buffer;
  u32 barriers;
  u64* partials;  // of the group
  float* sums;
  DEVICE Exchange(const SharedMemory& shared, u64* partials)
      : receive_buffer(reinterpret_cast<u32*>(shared.exchange)), barriers(shared.barriers), partials(partials),
        sums(shared.sums) {}
};

constexpr int SUMS = BLOCKS == 1 ? M_TILES : 1;  // tiles of sums of a warp, with one block per head

// Returns the address of the lane's row of the first tile of the warp's slice of the gradients of gates at address
// `gates`.
DEVICE u32 first_row(u32 gates, const ThreadCoord& coord) {
  return gates + slice(coord) * K_TILES * OPERAND_COLUMNS * 32 + row_in_operand(coord);
}

// With one block per head: multiplies the gradients of the gates of loop step `step` by this warp's part of R. The
// block must have synchronised since they were stored. With several blocks, this does nothing. IN_ROWS, their `row` is
// known (see first_row).
DEVICE void multiply(float (&c)[SUMS][BATCH_TILES][4], int step, const Weights& weights, const OperandScale& gate_scale,
                     const char* gates, u32 row, const ThreadCoord& coord) {
  if constexpr (BLOCKS > 1) return;
  Weights::Queue queue;
  weights.start(queue);
  if constexpr (IN_ROWS) {
    product_of_rows<SUMS, K_TILES, SPLIT_BYTES>(c, weights, queue, 0, row);
  } else {
    const u32 operand = shared_address(gates) + (step & 1) * GATE_BYTES + slice(coord) * K_TILES * OPERAND_COLUMNS * 32;
    product<SUMS, K_TILES, SPLIT_BYTES>(c, weights, queue, 0, operand, coord);
  }
  if (SCALED) scale_down(c, weights.scale, gate_scale);
}

// Computes the gradient of h that comes through R from the following time step, which is loop step `step`. With one
// block, `c` is its product; with several, their partial sums are received here.
DEVICE void recurrent_gradient(float (&sum)[CELLS], int step, const float (&c)[SUMS][BATCH_TILES][4],
                               const Exchange& from, const ThreadCoord& coord) {
  if constexpr (BLOCKS == 1) {
    float u[1][CELLS];
    reduce_slices<1>(u, c, from.sums, coord);
    UNROLL for (int q = 0; q < CELLS; q++) sum[q] = u[0][q];
  } else {
    UNROLL for (int q = 0; q < CELLS; q++) sum[q] = 0;
    if (CLUSTERED && step >= 0) {
      barrier_wait(from.barriers + (step & 1) * 8, (step >> 1) & 1);
      reduce_received(sum, from.receive_buffer + (step & 1) * (RECEIVE_BYTES / 4), coord);
    }
    if (GRID && step >= 0) {
      float c[1][BATCH_TILES][4], u[1][CELLS];
      reduce_published(c, from.partials, step, coord);
      reduce_slices<1>(u, c, from.sums, coord);
      UNROLL for (int q = 0; q < CELLS; q++) sum[q] = u[0][q];
    }
  }
}

// Multiplies this block's gradients of gates by its rows of R, and sends every block the sums of that block's units.
DEVICE void scatter_gradient(int step, const Weights& weights, const OperandScale& gate_scale, const char* gates,
                             const Exchange& to, const ThreadCoord& coord) {
  Weights::Queue queue;
  weights.start(queue);
  UNROLL for (int first = 0; first < M_TILES; first += M_CHUNK) {
    float c[M_CHUNK][BATCH_TILES][4] = {};
    const u32 operand = shared_address(gates) + (step & 1) * GATE_BYTES, odd = step & 1;
    product<M_CHUNK, K_TILES, SPLIT_BYTES>(c, weights, queue, first * K_TILES, operand, coord);
    if (PACKED) add_splits(c);
    if (SCALED) scale_down(c, weights.scale, gate_scale);
    const int tile = coord.warp * M_TILES + first;
    if constexpr (CLUSTERED)
      send_partials(c, tile, shared_address(to.receive_buffer) + odd * RECEIVE_BYTES, to.barriers + odd * 8, coord);
    else
      publish_partials(c, tile, to.partials, step, coord);
  }
}

// SCALED: computes the scales of the block's gradients of recurrent gates. The block must have synchronised since the
// scales of the previous step were read.
DEVICE void scale_of_gates(OperandScale& scale, const float (&d_g)[GATES][CELLS], float* magnitudes,
                           const ThreadCoord& coord) {
  // lane bits within a sequence
  constexpr int FIRST = IN_ROWS ? ROW_LANES / 2 : 16, LAST = IN_ROWS ? 1 : BOTH_UNITS ? 2 : 4;
  const int contribution = IN_ROWS ? 0 : coord.contribution();
  UNROLL for (int p = 0; p < PAIRS; p++) {
    float largest = 0;
    UNROLL for (int j = 0; j < GATES; j++)
      UNROLL for (int q = p * PAIR; q < p * PAIR + PAIR; q++)
        if (RECURRENT_OF[j] >= 0) largest = max(largest, fabsf(d_g[j][q]));
    UNROLL for (int mask = FIRST; mask >= LAST; mask /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
    if (coord.has_cells() && !(coord.lane & 2 * FIRST - LAST))
      magnitudes[contribution * SEQS + coord.sequence(p * PAIR)] = largest;
  }
  __syncthreads();
  scale.set(coord, [&](int sequence) {
    float largest = magnitudes[sequence];
    UNROLL for (int i = 1; i < (IN_ROWS ? 1 : CONTRIBUTIONS); i++)
      largest = max(largest, magnitudes[i * SEQS + sequence]);
    return largest;
  });
}

// Rounds the gradients of the gates, and stores those of recurrent gates as the operand of the product.
DEVICE void store_gate_operands(StoredCells (&rounded)[GATES], const float (&d_g)[GATES][CELLS],
                                const OperandScale& scale, const u32 (&to)[PAIRS], u32 offset,
                                const ThreadCoord& coord) {
  UNROLL for (int j = 0; j < GATES; j++) {
    rounded[j].round(d_g[j]);
    if (RECURRENT_OF[j] < 0 || !(LOADERS || coord.has_cells())) continue;
    StoredCells operand = rounded[j];
    if (SCALED) operand.multiply(scale.up);
    store_operand<GR * UNITS>(operand, to, offset + RECURRENT_OF[j] * UNITS * OPERAND_COLUMNS * 2);
  }
}
