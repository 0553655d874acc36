// The inputs of a forward step. They are copied to shared memory before the step begins.
#pragma once
#include "resident/kernels/forward_memory.cuh"

// Copies of x to shared memory, several steps ahead.
struct InputLoader {
  TileLoader<BYTES, GI, ROW * BYTES> x;
  DEVICE void start(const char* shared_inputs, const Params& params, const ThreadCoord& coord) {
    const u32 inputs = shared_address(shared_inputs);
    x.start(inputs + coord.load_tile() * INPUT_TILE_BYTES, coord,
            [&](i64 n) { return params.x + n * params.row_b * GI * ROW + coord.head * D; });
  }
  DEVICE void load_first(int steps, i64 x_step) {
    UNROLL for (int i = 0; i < STAGES - 1; i++) load(i, i, steps, x_step);
    copy_wait<IN_FLIGHT>();
  }
  DEVICE void load(int t, int stage, int steps, i64 x_step) {
    if (t < steps) x.load(stage * INPUT_BYTES, x_step);
    copy_commit();
  }
};
// Reads the inputs of the lane's cells from a stage. The block must have synchronised since the copies completed.
DEVICE void read_input(float (&v)[GI][CELLS], const char* stage, const ThreadCoord& coord) {
  const input_number* tile = reinterpret_cast<const input_number*>(stage + coord.cell_tile() * INPUT_TILE_BYTES);
  UNROLL for (int j = 0; j < GI; j++)
    if (coord.reads_cells()) read_cells(v[j], tile, j, coord);
}
