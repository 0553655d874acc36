// Where the parts of a block's dynamic shared memory lie. Forward and backward have the same parts, of sizes of their own.
#pragma once
#include "resident/kernels/scale.cuh"
#include "resident/kernels/unit_reductions.cuh"

// Sizes in bytes: OPERAND is one of two buffers, INPUTS of one step, FRAGMENTS of a warp. SUMS is the number of floats.
template <int OPERAND, int INPUTS, int SUMS, int EXCHANGE, int FRAGMENTS>
struct SharedMemoryOf {
  static constexpr int SIZE = 2 * OPERAND + STAGES * INPUTS + SUMS * 4 + EXCHANGE + WARPS * FRAGMENTS + BARRIER_BYTES + REDUCTION_BYTES +
                              CONSTANT_BYTES + MAGNITUDE_BYTES;
  static_assert(SIZE == SHARED_BYTES_EXPECTED, "resident/tiling.py counts the shared memory differently");

  char* operand;     // two buffers of the product's right operand: h, in the backward the gates' gradients
  char* inputs;      // STAGES steps of what is copied ahead
  float* sums;       // see reduce_slices
  char* exchange;    // forward: h of this block's units, to be sent; backward: two buffers of partial sums from all blocks
  char* fragments;   // what of R is not in registers
  u32 barriers;      // mbarriers of the exchange
  char* reductions;  // see UnitReductions
  float* constants;  // see load_constants
  float* magnitudes;  // see scale.cuh
  DEVICE SharedMemoryOf(char* memory) {
    operand = memory;
    inputs = operand + 2 * OPERAND;
    sums = reinterpret_cast<float*>(inputs + STAGES * INPUTS);
    exchange = reinterpret_cast<char*>(sums + SUMS);
    fragments = exchange + EXCHANGE;
    barriers = shared_address(fragments + WARPS * FRAGMENTS);
    reductions = fragments + WARPS * FRAGMENTS + BARRIER_BYTES;
    constants = reinterpret_cast<float*>(reductions + REDUCTION_BYTES);
    magnitudes = constants + CONSTANT_BYTES / 4;
  }
};
