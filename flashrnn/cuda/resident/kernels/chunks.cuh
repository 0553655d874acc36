// The parts of the backward's time loop, from the last step on, after which another kernel may read its results: multiples
// of CHUNK_UNIT steps, but for the last.
#pragma once
#include "kernels/memory.cuh"

// StepStrides of the next part, behind `done` and with `left` to come. Parts grow, so that there soon is something to do beside the
// loop, and shrink, so that little is left after it.
DEVICE int chunk_steps(int done, int left) {
  const int most = min(done, left / 4) / CHUNK_UNIT * CHUNK_UNIT;
  return min(left, max(most, CHUNK_UNIT));
}
