// The forward time loop of one head and batch tile. R stays on the chip; h is exchanged between warps and blocks at
// every step.
//
// Every warp multiplies its rows of R (16 units, all recurrent gates) by its slice of h_{t-1}. With K_SLICES > 1, the
// warps of a unit tile reduce their partial sums through shared memory (slice-K), after which a lane has the sums of
// its CELLS cells. After the element-wise step, h_t is sent to all warps: in one block through shared memory; in a
// cluster by st.async to the shared memory of every block, which completes on that block's mbarrier; in a grid (GRID)
// through global memory.
#pragma once
#include "resident/kernels/all_gather.cuh"
#include "resident/kernels/centred_weights.cuh"
#include "resident/kernels/forward_cells.cuh"
#include "resident/kernels/forward_inputs.cuh"
#include "resident/kernels/forward_product.cuh"
#include "resident/kernels/layers.cuh"

// Whether results are stored and inputs loaded during the exchange of a grid, not after the product. Steps that reduce
// over units have more of both, and need more registers for values.
constexpr bool WHILE_EXCHANGING = GRID && REDUCES;

// The same in a cluster during the first exchange over units. DENSE, the warps without cells load inputs meanwhile.
constexpr bool WHILE_REDUCING = CLUSTERED && REDUCES && (DENSE || CELL_SLICES == K_SLICES);

// Whether results are stored after the sums of R h have been exchanged in the block, not before, where these would wait
// for the stores. With float32 functions, which branch, that is slower unless others compute a part of the step.
constexpr bool STORES_LATE = IN_ROWS && (HELPED || BYTES == 2);

// Sends h of step t to all warps that multiply it at step t + 1. All threads of the block call this after they have
// stored their h. In a grid, `meanwhile` is called during the exchange.
template <class Meanwhile>
DEVICE void all_gather(int t, int next, bool exchange, const SharedMemory& shared, const Ring& ring,
                       u32 (&cleared)[OWN], const ThreadCoord& coord, const Meanwhile& meanwhile) {
  if constexpr (BLOCKS == 1) {
    __syncthreads();
  } else if constexpr (CLUSTERED) {
    named_barrier<TILE_THREADS>(1 + coord.unit_tile);
    if (exchange)
      send_h(shared.exchange, shared_address(shared.operand) + next * H_BYTES, shared.barriers + next * SEGMENTS * 8,
             coord);
  } else {
    __syncthreads();
    if (exchange) {
      ring.send(shared.exchange, cleared, t);
      meanwhile();
      ring.receive(shared.operand + next * H_BYTES, t);
    }
    __syncthreads();
  }
}

// The state of the time loop; all members are variables of the kernel.
struct Loop {
  const Params params;
  const SharedMemory& shared;
  const ThreadCoord& coord;
  const Ring& ring;
  const UnitReductions& units;
  const Weights& weights;
  const float (&row_biases)[GR][4];  // CENTRED: see MeanWeights
  const MeanWeights& mean_weights;
  const OperandScale& scale;  // of h
  const LaneCells& cells;
  const Resets& resets;
  const u32 (&h_operand)[PAIRS];  // addresses of the lane's h in the operand or the send buffer
  CarriedCells& carried;
  InputLoader& loader;
  Results& results;
  const int steps;
  int stage = 0;  // of the input ring that holds this step's inputs

  // IN_ROWS: the lane's first row of this step's operand, whose address is known before the step begins.
  u32 row = IN_ROWS ? first_row(shared_address(shared.operand), coord) : 0;
  DEVICE u32 row_of(int t) const {
    return IN_ROWS ? row : first_row(shared_address(shared.operand) + (t & 1) * H_BYTES, coord);
  }
  DEVICE void next_row() {
    if (IN_ROWS) row = 2 * first_row(shared_address(shared.operand), coord) + H_BYTES - row;
  }
  DEVICE void next_stage() { stage = stage + 1 == STAGES ? 0 : stage + 1; }
#if REDUCES
  DEVICE SquareSums squares() const { return {reinterpret_cast<float*>(shared.reductions), coord}; }
  // HELPED: computes the early values of step t, whose inputs are in `stage`.
  DEVICE void compute_early(int t) const {
    float v[GI][CELLS];
    EarlyValues::Cells early;
    read_input(v, shared.inputs + stage * INPUT_BYTES, coord);
    early_cells(early, carried, v, units);
    EarlyValues(shared.early, t).store(early);
  }
  // HELPED: runs time step t in the warps without cells.
  DEVICE void help_forward(int t) {
    float c[GR][BATCH_TILES][4] = {};
    begin_sums(c, carried.b, row_biases);
    multiply(c, weights, scale, row_of(t), shared.barriers, t, coord);
    if constexpr (CENTRED) mean_weights.centre(c, row);
    RowSums<GR, GR>{shared.sums, coord}.store(c);
    if constexpr (CENTRED) squares().store(c);
    __syncthreads();
    loader.load(t + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1, steps, params.x_step);
    next_stage();
    compute_early(t + 1);
    copy_wait<IN_FLIGHT>();
    next_row();
    __syncthreads();
  }
#endif

  // Runs time step t: the product with h_{t-1}, the element-wise step, and the exchange of h_t.
  DEVICE void step_forward(int t) {
    const int next = t + 1 & 1;
    const bool exchange = BLOCKS > 1 && t + 1 < steps;
    if (GRID && exchange) ring.clear(t + 1);
    if (CLUSTERED && exchange) expect_h(shared.barriers, next, coord);

    float c[GR][BATCH_TILES][4] = {};
    begin_sums(c, carried.b, row_biases);
    multiply(c, weights, scale, row_of(t), shared.barriers, t, coord);
    if constexpr (CENTRED) mean_weights.centre(c, row);
    u32 cleared[OWN];
    if (GRID && exchange) ring.load_cleared(cleared, t + 1);
    float v[GI][CELLS];
    u32 next_masks[PAIRS];
    read_input(v, shared.inputs + stage * INPUT_BYTES, coord);
    resets.masks(next_masks, t + 1);
    if (!STORES_LATE && !WHILE_EXCHANGING && !WHILE_REDUCING) results.store(carried.s, params, coord);
    auto load_inputs =
        [&, to = stage == 0 ? STAGES - 1 : stage - 1] { loader.load(t + STAGES - 1, to, steps, params.x_step); };
    if (!IN_ROWS && !WHILE_EXCHANGING && !WHILE_REDUCING) load_inputs();
#if REDUCES
    if constexpr (DENSE) SliceSums<GR>{c, shared.sums, coord}.store_for_all_lanes();  // all warps
    EarlyValues::Cells early;
    auto u = [&](float (&sums)[GR][CELLS], float (&mean_square)[CELLS]) {
      if constexpr (CENTRED) squares().store(c);
      reduce_slices<GR>(sums, c, shared.sums, coord);
      if constexpr (CENTRED) squares().load(mean_square);
      if constexpr (HELPED) EarlyValues(shared.early, t).load(early);
      if (STORES_LATE) results.store(carried.s, params, coord);  // while the loads of the sums are in flight
      if (IN_ROWS && !HELPED) load_inputs();
    };
#else
    float u[GR][CELLS];
    reduce_slices<GR>(u, c, shared.sums, coord);
#endif
    next_stage();

    // The send buffer has been read; else reduce_slices ensures it.
    if constexpr (CLUSTERED && K_SLICES == 1) __syncwarp();
    if (!IN_ROWS) read_constants(carried.constants, shared.constants, coord);
#if REDUCES
    if constexpr (WHILE_REDUCING) {
      auto access_memory = [&] { results.store(carried.s, params, coord), load_inputs(); };
      if (!DENSE || CELL_SLICES == K_SLICES || coord.warp_has_cells())
        step_cells(carried, results, v, u, early, cells.valid,
                   ReductionsAnd<decltype(access_memory)>{units, access_memory});
      else load_inputs();
    } else {
      step_cells(carried, results, v, u, early, cells.valid, units);
    }
#endif
    if (coord.has_cells()) {
#if !REDUCES
      step_cells(carried, results, v, u, cells.valid, units);
#endif
      results.h.round(carried.s[0]);
      results.h.get(carried.s[0]);
      StoredCells operand = results.h;
      if (RESET) operand.mask(next_masks);  // so that the recurrent sums of a step that is reset are zero
      if (SCALED) operand.multiply(scale.up);
      store_operand<BLOCKS == 1 ? PADDED : UNITS>(operand, h_operand, BLOCKS == 1 ? next * H_BYTES : 0);
    }
    UNROLL for (int q = 0; q < CELLS; q++) results.to_store[q] = cells.valid[q];
    UNROLL for (int p = 0; p < PAIRS; p++) carried.masks[p] = next_masks[p];
    if (!WHILE_EXCHANGING) copy_wait<IN_FLIGHT>();
    next_row();
    all_gather(t, next, exchange, shared, ring, cleared, coord, [&] {
      if (!WHILE_EXCHANGING) return;
      results.store(carried.s, params, coord);
      load_inputs();
      copy_wait<IN_FLIGHT>();
    });
  }
};

// In a grid: clears what this block publishes, and arrives at the grid barrier.
DEVICE void arrive_at_grid(const Ring& ring, const UnitReductions& units, const GridBarrier<BLOCKS>& grid_barrier) {
  units.clear();
  for (int i = 0; i < 3; i++) ring.clear(i);
  grid_barrier.arrive();
}

// Waits until all blocks of the group are ready to receive. In a grid, they must have called arrive_at_grid.
DEVICE void wait_for_group(const SharedMemory& shared, const UnitReductions& units,
                           const GridBarrier<BLOCKS>& grid_barrier, bool uses_grid_barrier) {
  if constexpr (CLUSTERED) {
    init_barriers(shared.barriers);
    units.init();
    cluster_sync();
  }
  if (uses_grid_barrier) grid_barrier.wait();
  __syncthreads();
}

// For a head that goes backwards in time: moves all tensors to the row of the last time step, with which it begins.
DEVICE void begin_at_last_step(Params& params) {
  const i64 last_row = (params.T - 1) * params.row_t;
  params.x += last_row * GI * ROW, params.h += last_row * ROW, params.aux += last_row * ROW;
  params.gates += last_row * HEADS * HEAD_NUMBERS;
  reverse_strides(params);
}

// Params: types and shapes are in resident/parameters.py. x, R, bias, initial, resets -> h, aux, last, gates (see
// ResidualGates). With GRID, `workspace` has a Ring for every group of the launch, followed by the words of their
// GridBarrier. Row (b, t) of x, h, aux and gates is row b * row_b + t * row_t: batch and time may be swapped in memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flashrnn_forward(PARAMETERS) {
#ifdef LAYERS
  launch_dependents();
#endif
  extern __shared__ __align__(128) char memory[];
  const SharedMemory shared(memory);
  Params params{PARAMETER_NAMES};
  const ThreadCoord coord(params);
  const int steps = static_cast<int>(params.T);
  if (backwards(coord.head)) begin_at_last_step(params);
  const Ring ring(params.workspace, coord);
  const GridBarrier<BLOCKS> grid_barrier(params.workspace + gridDim.x / BLOCKS * RING_VECTORS, params.launch);

  // Prologue: load R, the initial states and the first inputs, then wait until all blocks of the group are ready.
  UnitReductions units(shared.reductions, grid_barrier.words_of_all + gridDim.x, coord);
  const bool uses_grid_barrier = GRID && (REDUCES || steps > 1);
  if (uses_grid_barrier) arrive_at_grid(ring, units, grid_barrier);
  Weights weights;
  load_weights(weights, shared.fragments, params.R, coord);
  float row_biases[GR][4];
  MeanWeights mean_weights;
  if constexpr (CENTRED) mean_weights.load(row_biases, weights, shared.inputs, params, coord);
  LaneCells cells;
  CarriedCells carried;
  load_cells(cells, carried, params, coord);
  OperandScale scale;
  if (SCALED) scale_of_h(scale, shared.magnitudes, params, coord);
  store_initial_h(shared.operand, shared.magnitudes, params, coord);
  load_constants(shared.constants, params, coord);
  Results results;
  results.h.round(carried.s[0]);  // rounded as h of every step
  results.h.get(carried.s[0]);
  InputLoader loader;
  loader.start(shared.inputs, params, coord);
#ifdef LAYERS
  await_chunk(params.arrived, 0, params.producers);
#endif
  if (coord.loads_inputs()) loader.load_first(steps, params.x_step);
  else copy_commit(), copy_wait<0>();  // for R
  wait_for_group(shared, units, grid_barrier, uses_grid_barrier);
  results.start(params, cells, coord);
  if (WHILE_EXCHANGING) results.store(carried.s, params, coord);  // stores nothing, but advances to the first step
  u32 h_operand[PAIRS];
  operand_addresses(h_operand, shared_address(BLOCKS == 1 ? shared.operand : shared.exchange),
                    BLOCKS == 1 ? 0 : coord.rank * UNITS, coord);
  Resets cell_resets;
  cell_resets.start(params, cells, 0, WORD);
  cell_resets.masks(carried.masks, 0);
  if (IN_ROWS) read_constants(carried.constants, shared.constants, coord);  // here, registers suffice for them

  Loop loop{params, shared, coord, ring, units, weights, row_biases, mean_weights, scale, cells, cell_resets, h_operand,
    carried, loader, results, steps};
  auto run = [&](int begin, int end) {
    for (int t = begin; t < end; t++, units.step++) loop.step_forward(t);
  };
#ifdef LAYERS
  static_assert(!HELPED);
  const int chunk = for_each_chunk(steps, params.arrived, params.producers, params.done, coord.tile_thread == 0, run);
#else
#if REDUCES
  if constexpr (HELPED) {
    if (coord.helps()) loop.compute_early(0);
    __syncthreads();
  }
  if (coord.helps()) {
    for (int t = 0; t < steps; t++) loop.help_forward(t);
  } else
#endif
  if constexpr (RESET) {
    for (int begin = 0, end; begin < steps; begin = end) {
      end = min((begin + 1) / WORD * WORD + WORD - 1, steps);  // a step reads the masks of the next step
      run(begin, end);
      cell_resets.move_on(end + 1 + WORD);
    }
  } else {
    run(0, steps);
  }
#endif

  // Epilogue: the last results. No block exits while others may still send to it.
  results.store(carried.s, params, coord);
  store_states(carried.s, params, cells);
#ifdef LAYERS
  end_chunks(chunk, steps, params.done, coord.tile_thread == 0);
#endif
  if constexpr (CLUSTERED) cluster_sync();
  if (uses_grid_barrier) grid_barrier.reset();
}
