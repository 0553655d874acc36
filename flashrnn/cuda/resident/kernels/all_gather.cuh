// All-gather of h between the blocks of a group: each block sends the h of its units to all blocks.
#pragma once
#include "resident/kernels/forward_memory.cuh"

constexpr int TILE_VECTORS = 2 * SEQS;  // 16-byte vectors of one split of a unit tile's h
constexpr int SENT_COLUMNS = PACKED ? 4 : SEQS;  // columns of one split of all sequences

// Sends the h of the warp's unit tile from the send buffer to the shared memory of every block, where it completes on
// that block's mbarriers. Blocks send in the order of ranks, each beginning with its own, so that they do not all send
// to the same block at once. The threads of the unit tile must have synchronised since they stored h.
DEVICE void send_h(const char* send_buffer, u32 state, u32 barriers, const ThreadCoord& coord) {
  constexpr int AT_ONCE = TILE_THREADS / TILE_VECTORS;  // blocks
  const u32 vector = coord.tile_thread % TILE_VECTORS, first = coord.tile_thread / TILE_VECTORS;
  const u32 column = vector % SENT_COLUMNS;
  UNROLL for (int split = 0; split < OPERANDS; split++) {
    const u32 own = coord.unit_tile * TILE_VECTORS + vector;
    const uint4 value = reinterpret_cast<const uint4*>(send_buffer + split * UNITS * SEQS * 2)[own];
    UNROLL for (int i = 0; i < BLOCKS; i += AT_ONCE) {
      const u32 distance = i + first, rank = (coord.rank + distance) % BLOCKS;
      const u32 to = state + split * SPLIT_BYTES + (distance * UNIT_TILES * TILE_VECTORS + own) * 16;
      if (distance < BLOCKS && column % SPREAD == 0 && column / SPREAD < coord.used_columns())
        send(remote_address(to, rank), value, remote_address(barriers + distance / SEGMENT_BLOCKS * 8, rank));
    }
  }
}

// The same through global memory, for grids: a ring buffer with h of three steps. A word is EMPTY until its h has
// arrived. A block that has received h of a step from all blocks knows that none of them still reads h of the previous
// step.
constexpr int BLOCK_VECTORS = UNITS / 8 * SEQS, HEAD_VECTORS = BLOCKS * BLOCK_VECTORS;  // of one split
constexpr int RING_VECTORS = 3 * SPLITS * HEAD_VECTORS;
constexpr int OWN = (SPLITS * BLOCK_VECTORS + THREADS - 1) / THREADS;  // vectors of the block that a thread stores

// The ring buffer of this block's group.
struct Ring {
  uint4* slots;  // [3][SPLITS][HEAD_VECTORS]
  int own[OWN];  // indices of the block's vectors that this thread stores, or negative
  DEVICE Ring(uint4* rings, const ThreadCoord& coord) {
    slots = rings + blockIdx.x / BLOCKS * RING_VECTORS;
    UNROLL for (int k = 0; k < OWN; k++) {
      int i = k * THREADS + threadIdx.x, split = i / BLOCK_VECTORS;
      own[k] = split < SPLITS ? split * HEAD_VECTORS + coord.rank * BLOCK_VECTORS + i % BLOCK_VECTORS : -1;
    }
  }
  DEVICE uint4* slot(int t) const { return slots + t % 3 * (SPLITS * HEAD_VECTORS); }

  // Clears the slot of step t, long before h of that step is stored.
  DEVICE void clear(int t) const {
    UNROLL for (int k = 0; k < OWN; k++)
      if (own[k] >= 0) publish(slot(t) + own[k], make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
  }
  // Starts to load a word of each of the thread's vectors in the slot of step t, for `send` of step t - 1. Early,
  // because a load from L2 takes long.
  DEVICE void load_cleared(u32 (&cleared)[OWN], int t) const {
    UNROLL for (int k = 0; k < OWN; k++)
      if (own[k] >= 0) peek(cleared[k], slot(t) + own[k]);
  }
  // Stores h of step t, once the slot of step t + 1 is clear: so h also tells the other blocks that it is.
  DEVICE void send(const char* send_buffer, u32 (&cleared)[OWN], int t) const {
    UNROLL for (int k = 0; k < OWN; k++) {
      if (own[k] < 0) continue;
      while (cleared[k] != EMPTY) peek(cleared[k], slot(t + 1) + own[k]);
      publish(slot(t) + own[k], reinterpret_cast<const uint4*>(send_buffer)[k * THREADS + threadIdx.x]);
    }
  }
  // Copies h of step t to shared memory as it arrives.
  DEVICE void receive(char* state, int t) const {
    constexpr int VECTORS = SPLITS * HEAD_VECTORS, ALL = (VECTORS + THREADS - 1) / THREADS;
    constexpr int TOGETHER = ALL < 8 ? ALL : 8;
    for (int first = threadIdx.x; first < VECTORS; first += TOGETHER * THREADS) {
      const uint4* from = slot(t) + first;
      uint4 vectors[TOGETHER];
      bool missing[TOGETHER], any = true;
      UNROLL for (int k = 0; k < TOGETHER; k++) missing[k] = first + k * THREADS < VECTORS;
      while (any) {  // polls all missing vectors at once, which takes as long as polling one
        any = false;
        UNROLL for (int k = 0; k < TOGETHER; k++)
          if (missing[k]) peek(vectors[k], from + k * THREADS);
        UNROLL for (int k = 0; k < TOGETHER; k++) {
          if (!missing[k]) continue;
          missing[k] = !arrived(vectors[k]);
          any |= missing[k];
          if (!missing[k]) reinterpret_cast<uint4*>(state)[first + k * THREADS] = vectors[k];
        }
      }
    }
  }
};

// Initialises the mbarriers of both buffers. The blocks of the cluster must synchronise afterwards.
DEVICE void init_barriers(u32 barriers) {
  if (threadIdx.x == 0)
    for (int i = 0; i < 2 * SEGMENTS; i++) barrier_init(barriers + i * 8);
}
// Sets the number of bytes of h after which the mbarriers of a buffer complete their phase.
DEVICE void expect_h(u32 barriers, int buffer, const ThreadCoord& coord) {
  if (threadIdx.x == 0)
    for (int i = 0; i < SEGMENTS; i++)
      barrier_expect(barriers + (buffer * SEGMENTS + i) * 8, H_BYTES / SEGMENTS / SENT_COLUMNS * coord.used_columns());
}
