// The inputs of a backward step: gates, states and the gradients of the step's results. They are copied to shared
// memory, or loaded into registers, before the step begins.
#pragma once
#include "kernels/memory.cuh"
#include "resident/kernels/backward_memory.cuh"

// Returns the row of sequence n in the step that is `back` steps before the last.
DEVICE i64 last_row(const Params& params, i64 n, i64 back) {
  return n * params.row_b + (params.T - 1 - back) * params.row_t;
}

// Copies the statistics that the backward needs, for every step, to [SEQS in tile_row order][NEEDED_FLOATS] of each
// unit tile.
struct StatisticsLoader {
  static constexpr int WIDTH = STATISTIC_ALIGNMENT, OF_SEQUENCE = NEEDED_FLOATS * 4 / WIDTH;  // bytes per copy, copies
  static constexpr int ALL = LOADED_SEQUENCES * OF_SEQUENCE, COPIES = (ALL + LOAD_THREADS - 1) / LOAD_THREADS;
  const char* from[COPIES + 1];
  u32 to[COPIES + 1];
  bool copies[COPIES + 1], valid[COPIES + 1];
  // first(sequence) is the address of the head's gates in the first step.
  template <class First>
  DEVICE void start(u32 tile, const ThreadCoord& coord, First first) {
    UNROLL for (int i = 0; i < COPIES; i++) {
      const int copy = i * LOAD_THREADS + coord.load_thread();
      const int sequence = copy / OF_SEQUENCE % LOADED_SEQUENCES * SPREAD;
      copies[i] = copy < ALL, valid[i] = coord.has_sequence(sequence);
      const gate* gates = first(valid[i] ? coord.batch_index(sequence) : 0);
      from[i] = reinterpret_cast<const char*>(gates + D * STORED) + copy % OF_SEQUENCE * WIDTH;
      to[i] = tile + tile_row(sequence) * NEEDED_FLOATS * 4 + copy % OF_SEQUENCE * WIDTH;
      if (IN_ROWS) asm_fence(to[i]);
    }
  }
  DEVICE void load(u32 offset, i64 step, bool exists) {
    UNROLL for (int i = 0; i < COPIES; i++) {
      UNROLL for (int tile = 0; tile < LOADED_TILES; tile++)
        if (copies[i])
          copy_async<WIDTH>(to[i] + offset + tile * (INPUT_BYTES / UNIT_TILES), from[i], valid[i] && exists);
      from[i] += step;
    }
  }
};

// Copies gates, statistics, d_h, the other states before the step and, if the cell's gradient uses it, h before the
// step; from the last time step to the first.
//
// A branch around the copies splits the loop into parts that the compiler does not overlap. Without BRANCHES there is
// none, and copies for steps before the first write zeros. Clusters of four, and blocks of more than four unit tiles
// that use all columns, are slower without the branch.
struct StepInputs {
  static constexpr bool BRANCHES = !IN_ROWS && (BLOCKS > 1 || (UNIT_TILES > 4 && SPREAD == 1));
  const Params params;
  const ThreadCoord& coord;
  const u32 tile;
  const i64 head;
  TileLoader<sizeof(gate), 1, 0, STORED, GATES_IN_PIECES> gates;
  TileLoader<BYTES, 1, 0> d_h, h;
  using Aux = TileLoader<sizeof(aux_number), 1, 0>;
  Aux aux[STATES];
  const char* first_aux[STATES][Aux::COPIES];  // the addresses before the first step; used without BRANCHES
  StatisticsLoader statistics;

  DEVICE StepInputs(u32 tile, const Params& params, const ThreadCoord& coord)
      : params(params), coord(coord), tile(tile), head(coord.head * D) {
    auto head_gates = [&](i64 n) {
      return params.gates + last_row(params, n, 0) * HEADS * HEAD_NUMBERS +
          (GATES_IN_PIECES ? head : coord.head * HEAD_NUMBERS);
    };
    gates.start(tile, coord, head_gates);
    if constexpr (STATISTICS_NEEDED > 0) statistics.start(tile + STATISTICS_TILE, coord, head_gates);
    d_h.start(tile + D_H_TILE, coord, [&](i64 n) { return params.d_h + last_row(params, n, 0) * ROW + head; });
    h.start(tile + H_TILE, coord, [&](i64 n) { return params.h + last_row(params, n, 1) * ROW + head; });
    if constexpr (!BRANCHES) {
      start_aux(true);
      UNROLL for (int i = 0; i < STATES - 1; i++)
        UNROLL for (int k = 0; k < Aux::COPIES; k++) first_aux[i][k] = aux[i].from[k], asm_fence(first_aux[i][k]);
    }
    start_aux(params.T == 1);
    if constexpr (!BRANCHES) {
      gates.fence_addresses(), d_h.fence_addresses(), h.fence_addresses();
      UNROLL for (int i = 0; i < STATES - 1; i++) aux[i].fence_addresses();
    }
  }
  DEVICE void start_aux(bool first_step) {
    UNROLL for (int i = 0; i < STATES - 1; i++)
      aux[i].start(tile + AUX_TILE + i * STATE_ROW_BYTES, coord, [&](i64 n) {
        const aux_number* before = params.aux + (i * params.B * params.T + last_row(params, n, 1)) * ROW;
        return head + (first_step ? params.first_aux + (i * params.B + n) * ROW : before);
      });
  }
  // Starts the copies of the first steps of the loop, i.e. the last time steps, and waits for those of the very first.
  DEVICE void load_first(int steps) {
    UNROLL for (int i = 0; i < STAGES - 1; i++) load(steps - 1 - i, i);
    copy_wait<IN_FLIGHT>();
  }
  // Starts the copies of the inputs of step t into stage `stage`.
  DEVICE void load(int t, int stage) {
    if (!BRANCHES || t >= 0) {
      const bool exists = BRANCHES || t >= 0;
      gates.load(stage * INPUT_BYTES, -params.gates_step, exists, INPUT_BYTES / UNIT_TILES);
      if constexpr (STATISTICS_NEEDED > 0) statistics.load(stage * INPUT_BYTES, -params.gates_step, exists);
      d_h.load(stage * INPUT_BYTES, -params.h_step, exists, INPUT_BYTES / UNIT_TILES);
      to_initial_states(t);
      UNROLL for (int i = 0; i < STATES - 1; i++)
        aux[i].load(stage * INPUT_BYTES, -params.aux_step, exists, INPUT_BYTES / UNIT_TILES);
      if (USES_H && (!BRANCHES || t > 0))
        h.load(stage * INPUT_BYTES, -params.h_step, BRANCHES || t > 0, INPUT_BYTES / UNIT_TILES);
    }
    copy_commit();
  }
  // If t is the first time step, redirects the copies of the other states to the initial states.
  DEVICE void to_initial_states(int t) {
    if constexpr (BRANCHES) {
      if (STATES > 1 && t == 0 && params.T > 1) start_aux(true);
    } else {
      UNROLL for (int i = 0; i < STATES - 1; i++)
        UNROLL for (int k = 0; k < Aux::COPIES; k++) aux[i].from[k] = t == 0 ? first_aux[i][k] : aux[i].from[k];
    }
  }
};

// The inputs of a step for the lane's cells.
struct StepCells {
  float gates[PAIRS][PAIR_GATES], constants[CONSTANTS + 1][PAIR];  // constants: biases of gates that are not stored
  float d_h[CELLS], states[STATES][CELLS];                         // states: before the step
  u32 masks[PAIRS];
  NeededCells statistics;
  // Returns gate j of cell q.
  DEVICE float gate_of(int j, int q) const {
    if (STORED_OF[j] >= 0) return gates[q / PAIR][q % PAIR * STORED + (STORED_OF[j] >= 0 ? STORED_OF[j] : 0)];
    return constants[CONSTANT_OF[j] >= 0 ? CONSTANT_OF[j] : 0][q % PAIR];
  }
  // Reads everything that StepInputs has copied, except statistics. The block must have synchronised
  // since the copies completed.
  DEVICE void read(const char* tile, const float (&first_h)[CELLS], bool first, const ThreadCoord& coord) {
    if (coord.reads_cells()) {
      read_gates(reinterpret_cast<const gate*>(tile), coord);
      read_states(tile, first_h, first, coord);
    }
  }
  DEVICE void read_statistics(const char* tile, const ThreadCoord& coord) {
    if (!coord.reads_cells()) return;
    UNROLL for (int p = 0; p < PAIRS; p++) {
      const float4* from = reinterpret_cast<const float4*>(tile + STATISTICS_TILE) +
          tile_row(coord.sequence(p * PAIR)) * (NEEDED_FLOATS / 4);
      UNROLL for (int k = 0; k < STATISTICS_NEEDED; k++) {
        const float4 four = from[k / 4];
        UNROLL for (int q = p * PAIR; q < p * PAIR + PAIR; q++)
          statistics[k][q] = k % 4 == 0 ? four.x : k % 4 == 1 ? four.y : k % 4 == 2 ? four.z : four.w;
      }
    }
  }

 private:
  DEVICE void read_gates(const gate* tile, const ThreadCoord& coord) {
    UNROLL for (int p = 0; p < PAIRS; p++) {
      ResidualGates pair;
      pair.load(tile + tile_row(coord.sequence(p * PAIR)) * GATE_PITCH +
                (coord.unit(p * PAIR) - coord.cell_tile_unit()) * STORED);
      pair.get(gates[p]);
    }
  }
  DEVICE void read_states(const char* tile, const float (&first_h)[CELLS], bool first, const ThreadCoord& coord) {
    const scalar* rows = reinterpret_cast<const scalar*>(tile + D_H_TILE);
    read_cells(d_h, rows, 0, coord);
    UNROLL for (int i = 1; i < STATES; i++)
      read_cells(states[i], reinterpret_cast<const aux_number*>(tile + AUX_TILE + (i - 1) * STATE_ROW_BYTES), 0, coord);
    if constexpr (USES_H) {
      read_cells(states[0], rows, 1, coord);
      // A branch would split the loop.
      UNROLL for (int q = 0; q < CELLS; q++) states[0][q] = first ? first_h[q] : states[0][q];
    }
  }
};

// The gradients of the loss with respect to the other states after each step: loaded one step ahead, and prefetched
// into L2 a few steps earlier.
struct AuxGradients {
  static constexpr int OTHERS = HAS_D_AUX ? STATES - 1 : 1, AHEAD = 8;  // steps
  const char* from[OTHERS][PAIRS];
  float values[OTHERS][CELLS], next[OTHERS][CELLS];
  i64 step;  // bytes between consecutive steps
  DEVICE AuxGradients(const Params& params, const LaneCells& cells) : step(params.row_t * ROW * 4) {
    const float* const d_aux[] = D_AUX_ARRAY;  // null for zeros
    UNROLL for (int i = 0; i < OTHERS; i++)
      UNROLL for (int p = 0; p < PAIRS; p++) {
        const float* first = d_aux[i] + last_row(params, cells.sequence[p * PAIR], 0) * ROW + cells.element[p * PAIR];
        from[i][p] = d_aux[i] ? reinterpret_cast<const char*>(first) : nullptr;
        UNROLL for (int q = 0; q < PAIR; q++) next[i][p * PAIR + q] = 0;
      }
  }
  // Adds the gradient of state i of cell q. The first state, h, has none here.
  DEVICE void add_to(float& d, int i, int q) const {
    if (HAS_D_AUX && i > 0) d += values[i > 0 ? i - 1 : 0][q];
  }
  // Sets `values` to the gradients of step t + 1, and starts to load those of step t.
  DEVICE void load(int t, const bool (&valid)[CELLS]) {
    if (!HAS_D_AUX) return;
    UNROLL for (int i = 0; i < OTHERS; i++)
      UNROLL for (int q = 0; q < CELLS; q++) values[i][q] = next[i][q];
    if (t < 0) return;
    UNROLL for (int i = 0; i < OTHERS; i++)
      UNROLL for (int p = 0; p < PAIRS; p++) {
        if (!from[i][p] || !valid[p * PAIR]) continue;
        if constexpr (PAIR == 2) {
          const float2 pair = *reinterpret_cast<const float2*>(from[i][p]);
          next[i][2 * p] = pair.x, next[i][2 * p + 1] = pair.y;
        } else {
          next[i][p] = *reinterpret_cast<const float*>(from[i][p]);
        }
        from[i][p] -= step;
        if (t >= AHEAD) prefetch(from[i][p] - (AHEAD - 1) * step);
      }
  }
};
