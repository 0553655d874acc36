// Layers of a network that run at the same time, each a chunk of LAYER_CHUNK steps and its input product after the one below. A
// kernel waits for kernels that were launched before it alone: it is the programmatic dependent launch of the one before, whose
// blocks are all running by then.
#pragma once
#include "kernels/memory.cuh"

// Waits until `producers` blocks have counted the chunk in `counters`; null: all of it is there. For all threads of the block.
DEVICE void await_chunk(const u32* counters, int chunk, i64 producers) {
  if (!counters) return;
  if (threadIdx.x == 0) await(counters + chunk, u32(producers));
  __syncthreads();
}

// Counts a chunk, which this block has stored; null: nobody waits for it. For all threads of the block, of which those with
// `counts` count.
DEVICE void count_chunk(u32* counters, int chunk, bool counts) {
  if (!counters) return;
  __syncthreads();
  if (counts) signal(counters + chunk);
}

// Runs the steps of a layer's loop: waits for each chunk of its inputs before the first of them is loaded, STAGES - 1 steps ahead, and
// counts each chunk of its results when they are stored, in the step after it. In every step a barrier of a unit tile's threads
// follows their loads and stores, so one of them (`leads`) waits a step earlier and counts for all: that takes the time in which
// its warp would wait for other blocks. Returns the first chunk that is not counted yet.
template <class Run>
DEVICE int for_each_chunk(int steps, const u32* arrived, i64 producers, u32* done, bool leads, const Run& run) {
#ifdef LAYERS  // others have this header, too, and may load more steps ahead
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

// Counts the last chunks, whose results are stored, and waits for the end of the kernel before: so all before it are done as well.
DEVICE void end_chunks(int chunk, int steps, u32* done, bool leads) {
  for (; chunk * LAYER_CHUNK < steps; chunk++) count_chunk(done, chunk, leads);
  wait_for_primary();
}
