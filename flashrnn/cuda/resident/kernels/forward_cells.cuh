// The lane's cells in the forward: initialisation, an element-wise step, and its results.
#pragma once
#include "resident/kernels/cells.cuh"
#include "resident/kernels/unit_reductions.cuh"

// Whether the recurrent sums are initialised with the biases, which then cost nothing: possible if a warp's sums are
// complete and belong to its own cells, or with biases of the lane's rows of R.
constexpr bool SUM_HAS_BIAS = CENTRED || (K_SLICES == 1 && !IN_ROWS && !SCALED);
DEVICE void begin_sums(float (&c)[GR][BATCH_TILES][4], const float (&b)[GATES][CELLS], const float (&of_rows)[GR][4]) {
  if constexpr (CENTRED) {
    UNROLL for (int j = 0; j < GR; j++)
      UNROLL for (int n = 0; n < BATCH_TILES; n++)
        UNROLL for (int i = 0; i < 4; i++) c[j][n][i] = of_rows[j][i];
  } else if constexpr (SUM_HAS_BIAS) {
    UNROLL for (int j = 0; j < GATES; j++)
      UNROLL for (int q = 0; q < CELLS; q++)
        if (RECURRENT_OF[j] >= 0)
          c[RECURRENT_OF[j] >= 0 ? RECURRENT_OF[j] : 0][tile_of(q)][q % 2 * 2 + second_of(q)] = b[j][q];
  }
}

// Values that a lane carries from step to step for its cells.
struct CarriedCells {
  float s[STATES][CELLS];                // the states
  float b[GATES][CELLS];                 // the biases
  float constants[CONSTANTS + 1][PAIR];  // biases of gates that are not stored
  u32 masks[PAIRS];                      // of the step: see Resets
};

// Sets the coordinates of the lane's cells, and loads their initial states and biases.
DEVICE void load_cells(LaneCells& cells, CarriedCells& carried, const Params& params, const ThreadCoord& coord) {
  UNROLL for (int q = 0; q < CELLS; q++) {
    cells.sequence[q] = coord.batch_index(coord.sequence(q));
    cells.valid[q] = coord.has_cells() && coord.unit(q) < D && coord.has_sequence(coord.sequence(q));
    cells.element[q] = coord.head * D + coord.unit(q);
    UNROLL for (int i = 0; i < STATES; i++)
      carried.s[i][q] = cells.valid[q] ? params.initial[cells.state_index(i, q, params.B)] : 0;
    UNROLL for (int j = 0; j < GATES; j++)
      carried.b[j][q] = cells.valid[q] || HELPED ? float(params.bias[j * ROW + cells.element[q]]) : 0;
  }
}

// Returns the bias of gate j of cell q: `of_stored`, or one of the constants if the gate is not stored.
DEVICE float bias_of(int j, float of_stored, const float (&constants)[CONSTANTS + 1][PAIR], int q) {
  return STORED_OF[j] < 0 ? constants[CONSTANT_OF[j] >= 0 ? CONSTANT_OF[j] : 0][q % PAIR] : of_stored;
}

// The results of a step, which are stored during the following step, after its product has started: that waits for h
// only.
struct Results {
  StoredCells h;
  ResidualGates gates[PAIRS];
  StatisticCells statistics;
  bool to_store[CELLS] = {};  // none before the first step
  scalar* h_to[PAIRS];
  aux_number* aux_to[PAIRS];
  gate* gates_to[PAIRS];
  i64 aux_stride;  // between states
  DEVICE void start(const Params& params, const LaneCells& cells, const ThreadCoord& coord) {
    UNROLL for (int p = 0; p < PAIRS; p++) {
      // one step before the first
      i64 at = (cells.sequence[p * PAIR] * params.row_b - params.row_t) * ROW + cells.element[p * PAIR];
      h_to[p] = params.h + at, aux_to[p] = params.aux + at, gates_to[p] = params.gates + at * STORED;
      if constexpr (GATES_IN_PIECES) {
        const int number = coord.unit(p * PAIR) * GATES;
        gates_to[p] += in_pieces(number) - (coord.head * D * (GATES - 1) + number);
      }
      if constexpr (HEAD_NUMBERS > D * STORED)  // statistics, or padding to whole cache lines
        gates_to[p] += ((cells.sequence[p * PAIR] * params.row_b - params.row_t) * HEADS + coord.head) *
            (HEAD_NUMBERS - D * STORED);
      asm_fence(h_to[p]), asm_fence(aux_to[p]), asm_fence(gates_to[p]);
    }
    aux_stride = params.B * params.T * ROW;
    asm_fence(aux_stride);
  }
  DEVICE void store(const float (&s)[STATES][CELLS], const Params& params, const ThreadCoord& coord) {
    h.store_global(h_to, 0, to_store);
    UNROLL for (int i = 1; i < STATES; i++)
      if (STORE_AUX) store_cells(s[i], aux_to, (i - 1) * aux_stride, to_store);
    UNROLL for (int p = 0; p < PAIRS; p++)
      if (STORE_GATES && to_store[p * PAIR]) gates[p].store(gates_to[p]);
    if (STORE_GATES) store_statistics(statistics, gates_to, to_store, coord);
    UNROLL for (int p = 0; p < PAIRS; p++)
      advance(h_to[p], params.h_step), advance(aux_to[p], params.aux_step), advance(gates_to[p], params.gates_step);
  }
};

// Computes one element-wise step of the lane's cells from inputs v, recurrent sums u and what is carried. Sets the new
// states in `carried` and the stored gates in `results`. If the step reduces over units, recurrent_sums(u, mean_square)
// computes u and, CENTRED, its mean square, as late as possible; HELPED, another warp has computed `early`.
#if REDUCES
constexpr int MEAN_SQUARE = CENTRED ? GATES : 0;  // CENTRED: the mean square of the recurrent gates follows the gates
using GateCells = float[GATES + CENTRED][CELLS];
// Sets those gates of the lane's cells that have a recurrent part, or all others.
template <bool RECURRENT>
DEVICE void assemble_gates(GateCells& g, const CarriedCells& carried, const float (&v)[GI][CELLS],
                           const float (&u)[GR][CELLS]) {
  UNROLL for (int q = 0; q < CELLS; q++)
    UNROLL for (int j = 0; j < GATES; j++)  // the biases of the first pair are those of all pairs
      if (RECURRENT_OF[j] >= 0 == RECURRENT)
        g[j][q] = assemble_gate<SUM_HAS_BIAS>(j, bias_of(j, carried.b[j][q % PAIR], carried.constants, q), true,
                                              [&](int k) { return u[k][q]; }, [&](int k) { return v[k][q]; });
}

// HELPED: computes the early values of a step from its inputs v.
template <class Units>
DEVICE void early_cells(EarlyValues::Cells& early, const CarriedCells& carried, const float (&v)[GI][CELLS],
                        const Units& units) {
  GateCells g;
  float u[GR][CELLS];
  assemble_gates<false>(g, carried, v, u);
  if constexpr (HELPED) cells_forward_early(g, [] {}, early, units);
}

template <class RecurrentSums, class Units>
DEVICE void step_cells(CarriedCells& carried, Results& results, const float (&v)[GI][CELLS],
                       const RecurrentSums& recurrent_sums, const EarlyValues::Cells& early, const bool (&valid)[CELLS],
                       const Units& units) {
  GateCells g;
  float old[STATES][CELLS], fresh[STATES][CELLS], stored[GATES][CELLS];
  UNROLL for (int q = 0; q < CELLS; q++)
    UNROLL for (int i = 0; i < STATES; i++) old[i][q] = masked(carried.s[i][q], carried.masks[q / PAIR]);
  float u[GR][CELLS];
  assemble_gates<false>(g, carried, v, u);
  auto recurrent_gates = [&](GateCells&) { recurrent_sums(u, g[MEAN_SQUARE]), assemble_gates<true>(g, carried, v, u); };
  if constexpr (HELPED) cells_forward(g, old, early, recurrent_gates, fresh, results.statistics, stored, units);
  else cells_forward(g, old, recurrent_gates, fresh, results.statistics, stored, units);
  UNROLL for (int q = 0; q < CELLS; q++)
    UNROLL for (int i = 0; i < STATES; i++) carried.s[i][q] = FINITE || valid[q] ? fresh[i][q] : 0;
  if (!STORE_GATES) return;
  UNROLL for (int p = 0; p < PAIRS; p++) {
    float all[PAIR_GATES];
    UNROLL for (int j = 0; j < GATES; j++)
      UNROLL for (int q = 0; q < PAIR; q++)
        if (STORED_OF[j] >= 0) all[q * STORED + (STORED_OF[j] >= 0 ? STORED_OF[j] : 0)] = stored[j][p * PAIR + q];
    results.gates[p].round(all);
  }
}
#else
DEVICE void step_cells(CarriedCells& carried, Results& results, const float (&v)[GI][CELLS],
                       const float (&u)[GR][CELLS], const bool (&valid)[CELLS], const UnitReductions&) {
  float all_gates[PAIRS][PAIR_GATES];
  UNROLL for (int q = 0; q < CELLS; q++) {
    float gates[GATES], old[STATES], fresh[STATES];
    UNROLL for (int i = 0; i < STATES; i++) old[i] = masked(carried.s[i][q], carried.masks[q / PAIR]);
    UNROLL for (int j = 0; j < GATES; j++) {
      gates[j] = assemble_gate<SUM_HAS_BIAS>(
          j, bias_of(j, carried.b[j][q], carried.constants, q), true, [&](int k) { return u[k][q]; },
          [&](int k) { return v[k][q]; });
      if (STORED_OF[j] >= 0) all_gates[q / PAIR][q % PAIR * STORED + (STORED_OF[j] >= 0 ? STORED_OF[j] : 0)] = gates[j];
    }
    cell_forward(gates, old, fresh);
    UNROLL for (int i = 0; i < STATES; i++) carried.s[i][q] = FINITE || valid[q] ? fresh[i] : 0;
  }
  if (STORE_GATES)
    UNROLL for (int p = 0; p < PAIRS; p++) results.gates[p].round(all_gates[p]);
}
#endif

// Stores the states after the last step.
DEVICE void store_states(const float (&s)[STATES][CELLS], const Params& params, const LaneCells& cells) {
  UNROLL for (int q = 0; q < CELLS; q++)
    UNROLL for (int i = 0; i < STATES; i++)
      if (cells.valid[q]) params.last[cells.state_index(i, q, params.B)] = s[i][q];
}
