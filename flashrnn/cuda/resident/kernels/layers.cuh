// Layers of a network that run concurrently: each layer runs one chunk of LAYER_CHUNK steps and its input product later
// than the layer below. Every kernel is the programmatic dependent launch of the previous one, so it waits only for
// kernels whose blocks are all running.
#pragma once
#include "kernels/memory.cuh"

// Waits until `producers` blocks have counted the chunk in `counters`; a null pointer means that all chunks are
// available. All threads of the block call this.
DEVICE void await_chunk(const u32* counters, int chunk, i64 producers) {
  if (!counters) return;
  if (threadIdx.x == 0) await(counters + chunk, u32(producers));
  __syncthreads();
}

// Counts a chunk that this block has stored; a null pointer means that no kernel waits for it. All threads of the block
// call this; those with `counts` increment the counter.
DEVICE void count_chunk(u32* counters, int chunk, bool counts) {
  if (!counters) return;
  __syncthreads();
  if (counts) signal(counters + chunk);
}

// Runs the steps of a layer's loop as run(begin, end). Waits for each chunk of the inputs before its first step is
// loaded, STAGES - 1 steps ahead, and counts each chunk of the results once they are stored, one step later. In every
// step, a barrier of the threads of a unit tile follows their loads and stores, so one of them (`leads`) waits and
// counts for all. It waits one step early, when its warp would otherwise wait for other blocks. Returns the first chunk
// that has not been counted.
template <class Run>
DEVICE int for_each_chunk(int steps, const u32* arrived, i64 producers, u32* done, bool leads, const Run& run) {
#ifdef LAYERS  // other kernels include this header, and may load more steps ahead
  static_assert(STAGES < LAYER_CHUNK);
#endif
  int chunk = 0;  // of the results
  for (int begin = 0, end, next = 1; begin < steps; begin = end) {  // next: chunk of the inputs
    const bool stores = next > chunk + 1;
    end = min(stores ? (chunk + 1) * LAYER_CHUNK + 1 : next * LAYER_CHUNK - STAGES, steps);
    run(begin, end);
    if (end == steps) break;
    if (stores) {
      if (leads && done) signal(done + chunk);
      chunk++;
    } else {
      if (leads && arrived && next * LAYER_CHUNK < steps) await(arrived + next, u32(producers));
      next++;
    }
  }
  return chunk;
}

// Counts the remaining chunks, whose results have been stored, and waits for the completion of the previous kernel, and
// with it of all earlier ones.
DEVICE void end_chunks(int chunk, int steps, u32* done, bool leads) {
  for (; chunk * LAYER_CHUNK < steps; chunk++) count_chunk(done, chunk, leads);
  wait_for_primary();
}
