// The layout of a block's dynamic shared memory. Forward and backward have the same parts, of different sizes.
#pragma once
#include "resident/kernels/scale.cuh"
#include "resident/kernels/unit_reductions.cuh"

// Sizes in bytes: OPERAND of one of two buffers, INPUTS of one step, FRAGMENTS of a warp. SUMS is a number of floats.
template <int OPERAND, int INPUTS, int SUMS, int EXCHANGE, int FRAGMENTS>
struct SharedMemoryOf {
  static constexpr int SIZE = 2 * OPERAND + STAGES * INPUTS + SUMS * 4 + EXCHANGE + WARPS * FRAGMENTS + BARRIER_BYTES +
                              REDUCTION_BYTES + CONSTANT_BYTES + MAGNITUDE_BYTES + EarlyValues::SIZE;
  static_assert(SIZE == SHARED_BYTES_EXPECTED, "resident/tiling.py counts the shared memory differently");

  char* operand;     // two buffers of the product's right operand: h or, in the backward, gradients of gates
  char* inputs;      // STAGES steps of inputs
  float* sums;       // see reduce_slices
  char* exchange;    // forward: send buffer for h of this block; backward: two receive buffers of partial sums
  char* fragments;   // fragments of R that are not in registers
  u32 barriers;      // mbarriers of the exchange
  char* reductions;  // see UnitReductions
  float* constants;  // see load_constants
  float* magnitudes;  // see scale.cuh
  char* early;        // see EarlyValues
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
    early = reinterpret_cast<char*>(magnitudes) + MAGNITUDE_BYTES;
  }
};
