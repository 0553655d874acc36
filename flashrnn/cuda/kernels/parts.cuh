// The parts of the backward's time loop, from the last step on, after which another kernel may read its results.
#pragma once
#include "memory.cuh"

constexpr int PART_UNIT = 16;  // parts are multiples of so many steps, the last may be shorter

// Steps of the next part, behind `done` and with `left` to come. Parts grow, so that there soon is something to do beside the
// loop, and shrink, so that little is left after it.
DEVICE int part_steps(int done, int left) {
  const int most = min(done, left / 4) / PART_UNIT * PART_UNIT;
  return min(left, max(most, PART_UNIT));
}
