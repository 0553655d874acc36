// Sizes of the forward's tiles and of its parts of shared memory.
#pragma once
#include "resident/kernels/products.cuh"
#include "resident/kernels/shared_memory.cuh"
#include "resident/kernels/slice_sums.cuh"

constexpr int K_TILES = PADDED / 16 / K_SLICES;  // tiles of 16 along k, of a warp
static_assert(K_TILES * K_SLICES * 16 == PADDED);
using Weights = Fragments<GR * K_TILES, REGISTER_FRAGMENTS, false>;

// In a cluster, h arrives block by block, and a product of many tiles begins with the blocks that have arrived.
// Therefore the operand has h in the order of arrival, this block's own units first, in SEGMENTS segments that each
// have an mbarrier.
constexpr bool in_segments(int n) {
  return BLOCKS % n == 0 && BLOCKS / n * UNIT_TILES % K_SLICES == 0 && K_TILES / n >= 6;
}
constexpr int SEGMENTS = !CLUSTERED ? 1 : in_segments(4) ? 4 : in_segments(2) ? 2 : 1;
constexpr int SEGMENT_TILES = K_TILES / SEGMENTS;  // tiles of a warp in a segment
constexpr int SEGMENT_BLOCKS = BLOCKS / SEGMENTS;
static_assert(2 * SEGMENTS * 8 <= BARRIER_BYTES);
// Returns the unit of the head at index k of the operand.
DEVICE int unit_at(int k, const ThreadCoord& coord) {
  return CLUSTERED ? (coord.rank + BLOCKS - k / UNITS) % BLOCKS * UNITS + k % UNITS : k;
}

constexpr int SPLIT_BYTES = PADDED * OPERAND_COLUMNS * 2;
constexpr int H_BYTES = OPERANDS * SPLIT_BYTES;                   // h of a head, as the product's operand
constexpr int INPUT_TILE_BYTES = GI * ROW_BYTES + TILE_PADDING;
constexpr int INPUT_BYTES = UNIT_TILES * INPUT_TILE_BYTES;  // of a step
constexpr int SEND_BYTES = BLOCKS == 1 ? 0 : OPERANDS * UNITS * SEQS * 2;
using SharedMemory = SharedMemoryOf<H_BYTES, INPUT_BYTES, SUM_FLOATS<GR>, SEND_BYTES, Weights::SHARED>;
