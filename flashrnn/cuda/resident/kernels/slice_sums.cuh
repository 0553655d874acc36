// The reduction of the partial sums of the warps of a unit tile (slice-K).
#pragma once
#include "resident/kernels/tiles.cuh"

// IN_ROWS: floats between the sums of consecutive sequences in shared memory, which puts them in different banks.
constexpr int SUM_PITCH = PADDED + (SPREAD == 2 ? 8 : 4);

// Floats of shared memory for the partial sums of a unit tile's warps. SLICES: how many there are of each sum.
template <int ROWS, int SLICES = K_SLICES>
constexpr int SUM_FLOATS = IN_ROWS
    ? SLICES * ROWS * (SEQS / SPREAD) * SUM_PITCH : K_SLICES == 1 ? 0 : WARPS * CELL_SLICES * CELLS * 32 * ROWS;

// The partial sums of the K_SLICES warps of a unit tile: c has those of this warp for all cells of the lane's fragment,
// `sums` those of all warps, in shared memory. The results u are the complete sums of the lane's own CELLS cells.
template <int ROWS>
struct SliceSums {
  const float (&c)[ROWS][BATCH_TILES][4];
  float* const sums;
  const ThreadCoord& coord;

  DEVICE float part(int cell, int row) const { return c[row][tile_of(cell)][cell % 2 * 2 + second_of(cell)]; }
  // Returns the address of the sums of cell q of lane `lane`, for the warp with cell slice `to`, from the warp with k
  // slice `from`.
  DEVICE float* slot(int to, int from, int q, int lane) const {
    return sums + ((((coord.unit_tile * CELL_SLICES + to) * K_SLICES + from) * CELLS + q) * 32 + lane) * ROWS;
  }
  DEVICE void store_part(float* to, int cell) const {
    if constexpr (ROWS == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(part(cell, 0), part(cell, 1), part(cell, 2), part(cell, 3));
    } else {
      UNROLL for (int j = 0; j < ROWS; j++) to[j] = part(cell, j);
    }
  }
  DEVICE static void load_part(float (&v)[ROWS], const float* from) {
    if constexpr (ROWS == 4) *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(from);
    else
      UNROLL for (int j = 0; j < ROWS; j++) v[j] = from[j];
  }
  // One warp per tile: its sums are complete.
  DEVICE void own(float (&u)[ROWS][CELLS]) const {
    UNROLL for (int q = 0; q < CELLS; q++)
      UNROLL for (int j = 0; j < ROWS; j++) u[j][q] = part(q, j);
  }
  // DENSE: stores the sums of the columns that are used, for all lanes; reduce_stored returns them. All threads of the
  // unit tile call this.
  DEVICE void store_for_all_lanes() const {
    if (coord.lane_in_quad < 2)
      UNROLL for (int cell = 0; cell < 4; cell++)
        store_part(slot(cell / 2, coord.k_slice, 0, coord.lane + cell % 2 * 2), cell);
    named_barrier<TILE_THREADS>(1 + coord.unit_tile);
  }
  // Adds up the sums that all warps of the tile have stored for the lane's cell. The tile's threads must have
  // synchronised.
  DEVICE void reduce_stored(float (&u)[ROWS][CELLS]) const {
    UNROLL for (int from = 0; from < K_SLICES; from++) {
      float v[ROWS];
      load_part(v, slot(coord.cell_slice, from, 0, coord.lane));
      UNROLL for (int j = 0; j < ROWS; j++) u[j][0] = from == 0 ? v[j] : u[j][0] + v[j];
    }
  }
  // BOTH_UNITS in a grid. Half of the lanes begin with the other unit, so that lanes store to different banks.
  DEVICE void reduce_to_both_units(float (&u)[ROWS][CELLS]) const {
    const int half = coord.lane_in_quad / 2, lane = coord.lane - 2 * half;
    UNROLL for (int pair = 0; pair < LANE_CELLS / 2; pair++) {
      float* const to = slot(pair / 2 * 4 + 2 * half + pair % 2, coord.k_slice, 0, lane);
      store_chosen(to + 2 * half * ROWS, 2 * pair, half), store_chosen(to + (2 - 2 * half) * ROWS, 2 * pair + 1, half);
    }
    named_barrier<TILE_THREADS>(1 + coord.unit_tile);
    if (coord.has_cells()) reduce_stored(u);
  }
  // Stores the sums of a cell or, if `other`, of the same sequence's other unit.
  DEVICE void store_chosen(float* to, int cell, bool other) const {
    float v[ROWS];
    UNROLL for (int j = 0; j < ROWS; j++) v[j] = other ? part(cell ^ 1, j) : part(cell, j);
    if constexpr (ROWS == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      UNROLL for (int j = 0; j < ROWS; j++) to[j] = v[j];
    }
  }
  // Sends partial sums to the same lane of the warp that has the cell, which adds them to its own.
  DEVICE void reduce_to_same_lane(float (&u)[ROWS][CELLS]) const {
    UNROLL for (int to = 0; to < CELL_SLICES; to++)
      UNROLL for (int q = 0; q < CELLS; q++)
        if (to != coord.k_slice) store_part(slot(to, coord.k_slice, q, coord.lane), to * CELLS + q);
    named_barrier<TILE_THREADS>(1 + coord.unit_tile);
    if (!coord.has_cells()) return;
    UNROLL for (int q = 0; q < CELLS; q++) {
      UNROLL for (int j = 0; j < ROWS; j++) {
        u[j][q] = part(q, j);
        UNROLL for (int own = 1; own < CELL_SLICES; own++) {
          float value = part(own * CELLS + q, j);  // unconditionally, or the compiler puts c into local memory
          u[j][q] = own == coord.k_slice ? value : u[j][q];
        }
      }
      UNROLL for (int other = 1; other < K_SLICES; other++) {
        const int from = (coord.k_slice + other) % K_SLICES;
        float v[ROWS];
        load_part(v, slot(coord.k_slice, from, q, coord.lane));
        UNROLL for (int j = 0; j < ROWS; j++) u[j][q] += v[j];
      }
    }
  }
};

// IN_ROWS: the same through rows of a sequence's units, to the lanes that have these. A warp has sums of its unit tile,
// c [ROWS], as one of the K_SLICES warps of it. Or (TILES > ROWS = 1) it has sums of all unit tiles, c [TILES], as one
// of the block's warps.
template <int ROWS, int TILES>
struct RowSums {
  static constexpr bool ALL_TILES = TILES > ROWS;
  static_assert(TILES == (ALL_TILES ? UNIT_TILES : ROWS) && (ROWS == 1 || !ALL_TILES));
  float* const sums;
  const ThreadCoord& coord;
  // Returns the address of one warp's sums of two neighbouring units. `column`: of a sequence.
  DEVICE float2* pair_of(int slice, int row, int column, int unit) const {
    return reinterpret_cast<float2*>(sums + ((slice * ROWS + row) * (SEQS / SPREAD) + column / SPREAD) * SUM_PITCH +
                                     unit);
  }
  DEVICE void store(const float (&c)[TILES][BATCH_TILES][4]) const {
    UNROLL for (int cell = 0; cell < LANE_CELLS; cell += 2) {
      const int column = tile_of(cell) * 8 + 2 * coord.lane_in_quad + second_of(cell);
      UNROLL for (int i = 0; i < TILES; i++) {
        const float(&part)[4] = c[i][tile_of(cell)];
        const int unit = (ALL_TILES ? i * 16 : coord.tile_unit) + 2 * coord.quad;
        *pair_of(ALL_TILES ? coord.warp : coord.k_slice, ALL_TILES ? 0 : i, column, unit) =
            make_float2(part[second_of(cell)], part[2 + second_of(cell)]);
      }
    }
  }
  // Returns the complete sums of the lane's cells. The block must have synchronised since they were stored.
  DEVICE void load(float (&u)[ROWS][CELLS]) const {
    UNROLL for (int q = 0; q < CELLS; q += 2)
      UNROLL for (int j = 0; j < ROWS; j++) {
        constexpr int PARTS = ALL_TILES ? WARPS : K_SLICES;
        float2 sums[PARTS];
        UNROLL for (int slice = 0; slice < PARTS; slice++)
          sums[slice] = *pair_of(slice, j, coord.sequence(q), coord.unit(q));
        UNROLL for (int step = 1; step < PARTS; step *= 2)  // few additions after each other
          UNROLL for (int i = 0; i + step < PARTS; i += 2 * step)
            sums[i].x += sums[i + step].x, sums[i].y += sums[i + step].y;
        u[j][q] = sums[0].x, u[j][q + 1] = sums[0].y;
      }
  }
};

// Reduces the partial sums of the K_SLICES warps of a unit tile: c, this warp's sums for all cells of the lane's
// fragment, -> u, the complete sums for the lane's own cells, if it has any. `sums` has SUM_FLOATS<ROWS> elements. With
// K_SLICES > 1, all threads of the unit tile call this together; IN_ROWS, all threads of the block; DENSE, after
// store_for_all_lanes.
template <int ROWS, int TILES>
DEVICE void reduce_slices(float (&u)[ROWS][CELLS], const float (&c)[TILES][BATCH_TILES][4], float* sums,
                          const ThreadCoord& coord) {
  if constexpr (IN_ROWS) {
    const RowSums<ROWS, TILES> rows{sums, coord};
    rows.store(c);
    __syncthreads();
    rows.load(u);
  } else {
    const SliceSums<ROWS> slices{c, sums, coord};
    if constexpr (K_SLICES == 1) slices.own(u);
    else if constexpr (DENSE) slices.reduce_stored(u);
    else if constexpr (BOTH_UNITS) slices.reduce_to_both_units(u);
    else slices.reduce_to_same_lane(u);
  }
}
