// d_R, overlapped with the backward's time loop on multiprocessors that the loop leaves idle: the sum over rows (a row
// is a step of a sequence) of each gate's gradient times the previous h. A block computes TILES tiles of d_R, of UNITS
// of a head's GR * D rows by COLUMNS of its D columns. The tiles take turns: while the rows of some chunks are added to
// one tile, its sums are in registers; those of the other tiles are in memory, i.e. in the L2 cache.
//
// Float32, whose products take longer: a block of several tiles stops at the end of the turn during which the loop has
// ended. Another kernel (RESUMES) adds the remaining rows, with a block for each tile: all multiprocessors are free
// then.
#pragma once
#include "kernels/ring.cuh"
#include "resident/kernels/gradient_rows.cuh"

constexpr int MULTIPLYING = 2 * UNITS;  // threads: a warpgroup for 64 units
static_assert(THREADS == MULTIPLYING + (BYTES == 2 ? COPYING : 0));
// With 512 threads, those that multiply half types take registers from those that copy: enough for their sums.
constexpr bool TAKES_REGISTERS = THREADS == 512;
constexpr int REGISTERS = COLUMNS > 248 ? 160 : 152;
constexpr bool STOPS = TILES > 1 && BYTES == 4;
constexpr int FEW_STEPS = 48;  // that a block adds itself, because launching the other kernel takes about as long
// Half types: each thread that copies arrives at a stage's mbarrier, and each warp that multiplies at the other one.
using Barriers = RingBarriers<STAGES, COPYING, MULTIPLYING / 32>;
static_assert(STAGES > 1 &&
              SHARED_BYTES_EXPECTED >= STAGES * STAGE + (BYTES == 2 ? int(sizeof(Barriers)) : AHEAD * COPIED));

// The sums that a warpgroup computes.
struct Sums {
  float c[COLUMNS / 2] = {};
  float load_sums[COLUMNS / 2];  // float32: sums of one load. Tensor cores truncate: inaccurate for long sums

  // Starts the products of a load. All warps of the warpgroup call this.
  DEVICE void add(u32 stage) {
    warpgroup_begin();
    if constexpr (SPLITS == 1) products<true>(c, stage, 0, 0);
    else {
      products<false>(load_sums, stage, 0, 0);
      UNROLL for (int sum = 1; sum < SPLITS; sum++)
        UNROLL for (int left = 0; left <= sum; left++) products<true>(load_sums, stage, left, sum - left);
    }
    warpgroup_commit();
  }
  // Starts the products of one split of each operand. They are added to the sums if ADDS, else they replace them.
  template <bool ADDS>
  DEVICE static void products(float (&sums)[COLUMNS / 2], u32 stage, int left_split, int right_split) {
    const auto left = matrix(stage + left_split * LEFT + threadIdx.x / 128 * BLOCK, BLOCK);
    const auto right = matrix(stage + SPLITS * LEFT + right_split * RIGHT, BLOCK);
    warpgroup_mma<ADDS>(sums, left, right);
    UNROLL for (int row = 16; row < ROWS; row += 16)
      warpgroup_mma<true>(sums, from_row(left, row), from_row(right, row));
  }
  // float32: waits for the products of a load, and adds them with rounding.
  DEVICE void round() {
    warpgroup_wait_for(load_sums);
    UNROLL for (int i = 0; i < COLUMNS / 2; i++) c[i] += load_sums[i];
  }
  // Returns the address of the thread's sums of one of the block's tiles in memory.
  DEVICE static float4* saved(float* memory, int tile) {
    return reinterpret_cast<float4*>(memory) + (i64(blockIdx.x) * TILES + tile) * (COLUMNS / 8 * MULTIPLYING) +
        threadIdx.x;
  }
  DEVICE void save(float4* to) const {
    UNROLL for (int i = 0; i < COLUMNS / 2; i += 4)
      to[i / 4 * MULTIPLYING] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
  }
  DEVICE void load(const float4* from) {
    UNROLL for (int i = 0; i < COLUMNS / 2; i += 4) {
      const float4 sums = from[i / 4 * MULTIPLYING];
      c[i] = sums.x, c[i + 1] = sums.y, c[i + 2] = sums.z, c[i + 3] = sums.w;
    }
  }
  DEVICE void clear() {
    UNROLL for (int i = 0; i < COLUMNS / 2; i++) c[i] = 0;
  }
  DEVICE void store(scalar* d_R, const Tile& tile) const {
    const int lane = threadIdx.x % 32;
    UNROLL for (int half = 0; half < 2; half++) {
      const int unit = tile.unit + threadIdx.x / 32 * 16 + half * 8 + lane / 4, gate = unit / D;
      const i64 row = ((i64(gate) * HEADS + tile.head) * D + unit % D) * D;
      UNROLL for (int n = 0; n < COLUMNS / 8; n++) {
        const int column = tile.column + n * 8 + lane % 4 * 2;
        const bool exists = gate < GR && tile.head < HEADS && column < D;
        if (exists) store_pair(d_R + row + column, c[4 * n + 2 * half], c[4 * n + 2 * half + 1]);
      }
    }
  }
  DEVICE static void store_pair(scalar* to, float low, float high) {
    if constexpr (BYTES == 2) *reinterpret_cast<u32*>(to) = pack(low, high);
    else *reinterpret_cast<float2*>(to) = make_float2(low, high);
  }
};

// Returns tile number `tile` of the block.
DEVICE Tile tile_of_block(int tile) { return Tile(blockIdx.x * TILES + tile); }

// The order in which the tiles of a block take turns, and the number of loads in each turn.
struct Turns {
  int sequences, steps;
  int begin, end, chunks = 0;      // the steps of the turn; the number of chunks up to its end
  int turn = TILES - 1, left = 0;  // left: remaining loads of the turn
  bool reversed = true;            // the tile that was last, in registers, is the first in the next turns
  int count = 0, last = -1;        // the number of turns so far; that of the turn at whose end the block stops early

  DEVICE Turns(const Rows& rows, int first) : sequences(rows.sequences), steps(rows.steps), begin(first), end(first) {}
  DEVICE bool over() const { return left == 0 && ((STOPS && count == last) || (end == steps && turn == TILES - 1)); }
  DEVICE int tile() const { return reversed ? TILES - 1 - turn : turn; }
  // Returns up to which step the rows have been added to a tile at the end of the turn.
  DEVICE int added(int tile) const { return (reversed ? TILES - 1 - tile : tile) <= turn ? end : begin; }
  // Returns how many steps are left then for the tile with the most.
  DEVICE int most_left() const { return steps - (turn < TILES - 1 ? begin : end); }
  // Advances to the next turn; returns whether that begins with new chunks.
  DEVICE bool next() {
    const bool others = ++turn == TILES;
    count++;
    if (others) {
      turn = 0, reversed = !reversed, begin = end;
      // Few turns, but short ones at the beginning, when this kernel waits for the loop, and at the end, when it is
      // waited for.
      const int enough = TILES > 1 ? min(TURN_STEPS, min(begin, (steps - begin) / 2)) : 0;
      if (RESUMES) end = steps;
      while (!RESUMES && (end == begin || end - begin < enough)) end += chunk_steps(end, steps - end), chunks++;
    }
    left = (end - begin + CHUNK_UNIT - 1) / CHUNK_UNIT * ((sequences + TOGETHER - 1) / TOGETHER);
    return others;
  }
};

// The loads of all turns, in order.
struct Loads {
  const u32* progress;
  u32 producers;
  Turns turns;
  RowSource source;
  Cursor at;
  int counted = 0;  // STOPS: the number of chunks that the loop counts
  u32 done = 0;     // first thread: how many of its blocks had counted the last one, when the last load of a turn began
  DEVICE Loads(const Params& params, const Rows& rows, int first)
      : progress(params.progress), producers(u32(params.producers)), turns(rows, first),
        source(rows, tile_of_block(turns.tile())) {
    if (!STOPS) return;
    for (int end = chunk_steps(0, rows.steps); end < rows.steps; counted++) end += chunk_steps(end, rows.steps - end);
  }

  // Returns whether another kernel adds the remaining rows faster. All threads of the block call this.
  DEVICE bool are_left_over() const {
    if (!STOPS || turns.count == 0 || turns.most_left() <= FEW_STEPS) return false;
    return __syncthreads_or(threadIdx.x == 0 && done == producers);
  }
  // Waits until the rows of the next load have been written; returns false if there is none. All threads that copy call
  // this.
  DEVICE bool ready() {
    if (turns.left > 0) return true;
    if (are_left_over()) turns.last = turns.count;
    if (turns.over()) return false;
    if (turns.next()) {
      if (turns.end < turns.steps) {
        if (copier() == 0) await(progress + turns.chunks - 1, producers);
      } else {
        wait_for_primary();
        if (VECTOR * BYTES < 16) invalidate_l1();  // copies of 16 bytes bypass L1, smaller ones do not
      }
      named_barrier<COPYING>(1);
    }
    if (TILES > 1) source = RowSource(source.rows, tile_of_block(turns.tile()));
    at = source.first(turns.steps - turns.begin - CHUNK_UNIT);
    return true;
  }
  DEVICE void advance() {
    if (--turns.left > 0) source.advance(at);
    else if (STOPS && threadIdx.x == 0) done = read_counter(progress + counted - 1);  // needed one load later
  }
};

// The products of all turns, in the order of loads.
struct Products {
  Sums sums;
  Turns turns;
  scalar* d_R;
  float* memory;  // for the sums that are not in registers
  DEVICE Products(const Params& params, const Rows& rows, int first)
      : turns(rows, first), d_R(params.d_R), memory(params.sums) {
    if (RESUMES && first > 0) sums.load(Sums::saved(memory, 0));
  }

  // Starts to add the products of a load.
  DEVICE void add(u32 stage) {
    if (turns.left == 0) {
      const int held = turns.tile();
      turns.next();
      if (TILES > 1 && turns.tile() != held) take_turns(held);
    }
    turns.left--;
    sums.add(stage);
  }
  // Saves the sums of tile `held` and loads those of the current tile.
  DEVICE void take_turns(int held) {
    if (SPLITS == 1) warpgroup_wait<0>();
    put_aside(held);
    if (turns.begin == 0) sums.clear();
    else sums.load(Sums::saved(memory, turns.tile()));
  }
  // Stores the sums of a tile in d_R if all rows have been added, else in memory.
  DEVICE void put_aside(int tile) const {
    if (TILES == 1 || turns.end == turns.steps) sums.store(d_R, tile_of_block(tile));
    else sums.save(Sums::saved(memory, tile));
  }
};

// Returns whether there is another load. All threads of the block call this.
DEVICE bool is_ready(Loads& loads, Products& products) {
  const bool found = loads.ready();
  products.turns.last = loads.turns.last;
  return found;
}

// Half types: all loads by a warpgroup of their own, as far ahead as there are stages.
DEVICE void copy_halves(Loads& loads, u32 shared, Barriers& barriers) {
  for (RingPosition<STAGES> at; loads.ready(); loads.advance(), at.next()) {
    barrier_wait(shared_address(barriers.empty + at.slot), at.parity ^ 1);
    copy_load(shared + at.slot * STAGE, loads.source, loads.at);
    barrier_arrive_with_copies(shared_address(barriers.full + at.slot));
  }
}

// Half types: the products of all loads. Those of up to two loads are in flight.
DEVICE void add_halves(Products& products, u32 shared, Barriers& barriers) {
  u32 previous = 0;  // mbarrier of the previous load
  for (RingPosition<STAGES> at; !products.turns.over(); at.next()) {
    barrier_wait(shared_address(barriers.full + at.slot), at.parity);
    fence_async_shared();
    products.add(shared + at.slot * STAGE);
    warpgroup_wait<1>();  // for the products of the previous load
    __syncwarp();
    if (previous && threadIdx.x % 32 == 0) barrier_arrive(previous);
    previous = shared_address(barriers.empty + at.slot);
  }
  warpgroup_wait<0>();
}

// TF32: each thread copies asynchronously to its own part of shared memory, AHEAD loads ahead, and splits what it has
// copied.
DEVICE void add_copied_floats(Products& products, Loads& loads, u32 shared) {
  const CopiedFloats floats(shared + STAGES * STAGE);
  auto copy = [&](int copied) {
    if (is_ready(loads, products)) floats.copy(copied, loads.source, loads.at), loads.advance();
    copy_commit();
  };
  for (int load = 0; load < AHEAD; load++) copy(load);
  for (int load = 0, copied = 0; !products.turns.over(); load++, copied = copied + 1 == AHEAD ? 0 : copied + 1) {
    const u32 stage = shared + load % STAGES * STAGE;
    copy_wait<AHEAD - 1>();  // the thread's own copies, which no other thread reads
    floats.store(copied, stage);  // while the products of the previous load are in flight
    fence_async_shared();
    copy(copied);
    if (load > 0) products.sums.round();
    __syncthreads();
    products.add(stage);
  }
  products.sums.round();
}

// float32: through registers, one load ahead.
DEVICE void add_floats(Products& products, Loads& loads, u32 shared) {
  Floats floats;
  auto copy = [&] {
    if (is_ready(loads, products)) floats.load(loads.source, loads.at), loads.advance();
  };
  copy();
  // Splits a load while the products of the previous one are in flight.
  for (int load = 0; !products.turns.over(); load++) {
    const u32 stage = shared + load % 2 * STAGE;
    floats.store(stage);
    fence_async_shared();
    const bool waits = loads.turns.left == 0;  // the next load may have to wait for a chunk
    if (!waits) copy();
    if (load > 0) products.sums.round();
    __syncthreads();
    products.add(stage);
    if (waits) copy();
  }
  products.sums.round();
}

DEVICE void run_halves(const Params& params, char* memory) {
  const Rows rows(params);
  const u32 shared = shared_address(memory);
  Barriers& barriers = *reinterpret_cast<Barriers*>(memory + STAGES * STAGE);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (threadIdx.x >= MULTIPLYING) {
    if constexpr (TAKES_REGISTERS) give_registers<512 - 3 * REGISTERS>();
    Loads loads(params, rows, 0);
    copy_halves(loads, shared, barriers);
  } else {
    if constexpr (TAKES_REGISTERS) take_registers<REGISTERS>();
    Products products(params, rows, 0);
    add_halves(products, shared, barriers);
    products.put_aside(products.turns.tile());  // whose sums are in registers
  }
}

DEVICE void run_floats(const Params& params, char* memory) {
  const Rows rows(params);
  const int first = RESUMES ? params.added[blockIdx.x] : 0;
  if (RESUMES && first == rows.steps) return;
  Loads loads(params, rows, first);
  Products products(params, rows, first);
  if constexpr (COPIES_FLOATS) add_copied_floats(products, loads, shared_address(memory));
  else add_floats(products, loads, shared_address(memory));
  products.put_aside(products.turns.tile());  // whose sums are in registers
  if constexpr (STOPS) {
    if (threadIdx.x < TILES) params.added[blockIdx.x * TILES + threadIdx.x] = products.turns.added(threadIdx.x);
    wait_for_primary();  // the kernel after this one also reads what the loop has written
  }
}

// Params: types and shapes are in concurrent_gradient.py. d_x, d_u, h, initial h or null, reset -> d_R. Batch and time
// of d_x, d_u and h may be swapped in memory: consecutive steps are row_t rows apart. Each of the loop's `producers`
// blocks increments the word in `progress` of each finished chunk except the last. With several tiles, `sums` is memory
// for their sums. STOPS: `added` [tiles] receives the number of steps that have been added. RESUMES reads both.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_concurrent_gradient(PARAMETERS) {
  extern __shared__ __align__(1024) char memory[];
  const Params params{PARAMETER_NAMES};
  if constexpr (BYTES == 2) run_halves(params, memory);
  else run_floats(params, memory);
}
