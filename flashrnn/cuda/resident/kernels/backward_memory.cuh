// Sizes of the backward's tiles and of its parts of shared memory.
#pragma once
#include "resident/kernels/products.cuh"
#include "resident/kernels/shared_memory.cuh"
#include "resident/kernels/slice_sums.cuh"

// With one block, the warps of a unit tile split the product's inner axis (slice-K). IN_ROWS, where sums go through
// shared memory anyway, one warp for a unit tile multiplies its part of the inner axis for all unit tiles (ALL_TILES):
// so it reads only this part of the operand.
constexpr bool ALL_TILES = IN_ROWS && K_SLICES == 1;
constexpr int SLICES = BLOCKS > 1 ? 1 : ALL_TILES ? WARPS : K_SLICES;
constexpr int K_TILES = GR * UNITS / 16 / SLICES;
constexpr int M_TILES = PADDED / 16 * SLICES / WARPS;  // tiles of 16 units of the head for which a warp computes sums
constexpr int M_CHUNK =  // computed at once
    M_TILES <= 8 ? M_TILES : M_TILES % 4 == 0 ? 4 : M_TILES % 3 == 0 ? 3 : M_TILES % 2 == 0 ? 2 : 1;
static_assert(M_TILES * WARPS * 16 == PADDED * SLICES && GR * UNIT_TILES % SLICES == 0);
static_assert(SPREAD == 1 || BLOCKS == 1);
using Weights = Fragments<M_TILES * K_TILES, REGISTER_FRAGMENTS, true>;

constexpr int SPLIT_BYTES = GR * UNITS * OPERAND_COLUMNS * 2;
constexpr int GATE_BYTES = OPERANDS * SPLIT_BYTES;                        // dg of a step, as the product's operand
constexpr int STATE_ROW_BYTES = SEQS * 16 * 4;                            // 16 units of a state in float32
constexpr int GATE_PITCH = pitch(STORED);
// after the gates of a unit tile
constexpr u32 D_H_TILE = SEQS * GATE_PITCH * sizeof(gate), H_TILE = D_H_TILE + ROW_BYTES;
constexpr u32 AUX_TILE = H_TILE + USES_H * ROW_BYTES;
constexpr u32 STATISTICS_TILE = AUX_TILE + (STATES - 1) * STATE_ROW_BYTES;
constexpr int INPUT_BYTES = UNIT_TILES * (STATISTICS_TILE + SEQS * NEEDED_FLOATS * 4 + TILE_PADDING);  // of a step
constexpr int RECEIVE_BYTES = CLUSTERED ? PADDED * SEQUENCES * BYTES : 0;        // partial sums from all blocks
constexpr int SLICE_FLOATS = CLUSTERED ? 0 : SUM_FLOATS<1, SLICES>;       // partial sums of the warps of a tile
using SharedMemory = SharedMemoryOf<GATE_BYTES, INPUT_BYTES, SLICE_FLOATS, 2 * RECEIVE_BYTES, Weights::SHARED>;
