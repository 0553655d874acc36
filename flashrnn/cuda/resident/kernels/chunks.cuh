// The chunks of the backward's time loop. After a chunk, an overlapped kernel may read its results. Chunks are
// multiples of CHUNK_UNIT steps, except the last.
#pragma once
#include "kernels/memory.cuh"

// Returns the number of steps of the next chunk, after `done` steps and with `left` remaining. Chunks are small at the
// beginning, so that the overlapped kernel starts early, and at the end, so that little work remains for it after the
// loop.
DEVICE int chunk_steps(int done, int left) {
  const int most = min(done, left / 4) / CHUNK_UNIT * CHUNK_UNIT;
  return min(left, max(most, CHUNK_UNIT));
}
