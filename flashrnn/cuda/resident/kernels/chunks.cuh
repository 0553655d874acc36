// The chunks of the backward's time loop. When a chunk is done, an overlapped kernel may read its results. Chunks are multiples
// of CHUNK_UNIT steps, except for the last one.
#pragma once
#include "kernels/memory.cuh"

// Return the steps of the next chunk, after `done` steps and with `left` to come. Chunks begin small, so that the overlapped
// kernel soon has something to do, and end small, so that little is left for it after the loop.
DEVICE int chunk_steps(int done, int left) {
  const int most = min(done, left / 4) / CHUNK_UNIT * CHUNK_UNIT;
  return min(left, max(most, CHUNK_UNIT));
}
