// Products of R, which stays on the chip, with an operand tile.
#pragma once
#include "resident/kernels/scale.cuh"

// The left-operand fragments of mma that stay on the chip for the whole time loop, some in registers, the rest in
// shared memory. Tile i of a warp is a 16 x 16 tile of R, or of R transposed, in SPLITS fragments. Row r of a fragment
// is unit 2r of the tile, and row r + 8 is unit 2r + 1.
template <int TILES, int IN_REGISTERS, bool TRANSPOSED>
struct Fragments {
  static constexpr int TOTAL = TILES * SPLITS;
  static constexpr int SHARED = (TOTAL - IN_REGISTERS) * 32 * 16;  // bytes of shared memory, per warp
  // Fragments in registers and in shared memory alternate, so that products of the former hide the latency of loading
  // the latter.
  static DEVICE constexpr int register_index(int f) { return f * IN_REGISTERS / TOTAL; }
  static DEVICE constexpr bool in_registers(int f) { return register_index(f + 1) > register_index(f); }
  u32 registers[IN_REGISTERS + 1][4];  // the last is unused: register_index of trailing shared fragments
  u32 shared;  // address of this lane's part of the shared fragments
  Scale scale;  // SCALED: of the warp's tiles

  // Loads R, in part by asynchronous copies, for which the warp must wait before it uses the fragments. tile(i, row,
  // column) is the address of elements (row, column) and (row, column + 1) of tile i of R, or null outside R.
  template <class Tile>
  DEVICE void load(char* memory, const scalar* R, const ThreadCoord& coord, Tile tile) {
    const u32 own = shared_address(memory) + coord.warp * SHARED;
    if constexpr (SCALED) scale = Scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest(coord, tile)))));
    if constexpr (BY_ROWS) {
      shared = own + row_offset(coord.lane % 16, coord.lane / 16);
      const u32 to = own + row_offset(coord.lane / 2, coord.lane % 2);
      if (STAGED) load_registers(to, R, coord, tile);
      copy_rows(to, 0, IN_SHARED, R, coord, tile, [](int f) { return f * TOTAL / FRAGMENTS; });
    } else {
      shared = own + coord.lane * 16;
      if constexpr (TRANSPOSED || SPLITS > 1) load_shared(coord, tile);
      else copy_shared(R, coord, tile);
    }
    if (STAGED) return;
    UNROLL for (int i = 0; i < TILES; i++) {
      if (register_index(i * SPLITS) == register_index((i + 1) * SPLITS)) continue;
      Pair pairs[4];
      read(pairs, i, coord, tile);
      UNROLL for (int f = i * SPLITS; f < (i + 1) * SPLITS; f++) {
        u32 value[4];
        next_splits(value, pairs);
        if (in_registers(f))
          UNROLL for (int r = 0; r < 4; r++) registers[register_index(f)][r] = value[r];
      }
    }
  }
  static constexpr int IN_SHARED = TOTAL - IN_REGISTERS, FRAGMENTS = IN_SHARED > 0 ? IN_SHARED : 1;
  // BY_ROWS: rows that begin at multiples of 16 bytes are copied in 16-byte vectors and stay rows in shared memory;
  // ldmatrix loads fragments from them. STAGED: so are the fragments that belong in registers, through the memory of
  // the others.
  static constexpr bool BY_ROWS = !TRANSPOSED && SPLITS == 1 && D % 8 == 0;
  static constexpr bool STAGED = BY_ROWS && IN_REGISTERS > 0 && 2 * IN_SHARED >= IN_REGISTERS;
  // Returns the offset of half a row in a fragment of 16 rows of 32 bytes, swizzled such that ldmatrix reads from all
  // banks.
  static DEVICE u32 row_offset(int row, int half) { return row * 32 + (half ^ (row / 4 % 2)) * 16; }
  // Starts copies of `count` fragments of one kind (in registers or shared), from number `first` on. index(k) is the
  // tile of fragment k of that kind.
  template <class Tile, class Index>
  DEVICE void copy_rows(u32 to, int first, int count, const scalar* R, const ThreadCoord& coord, Tile tile,
                        Index index) const {
    const int row = coord.lane / 2;
#pragma unroll 1
    for (int k = 0; k < count; k++) {
      const scalar* from = tile(index(first + k), row % 8 * 2 + row / 8, coord.lane % 2 * 8);
      copy_async<16>(to + k * 512, from ? from : R, from);
    }
  }
  // Loads the fragments in registers through shared memory at `to`.
  template <class Tile>
  DEVICE void load_registers(u32 to, const scalar* R, const ThreadCoord& coord, Tile tile) {
    auto index = [](int k) { return ((k + 1) * TOTAL + IN_REGISTERS - 1) / max(IN_REGISTERS, 1) - 1; };
    UNROLL for (int first = 0; first < IN_REGISTERS; first += FRAGMENTS) {
      copy_rows(to, first, min(FRAGMENTS, IN_REGISTERS - first), R, coord, tile, index);
      copy_commit();
      copy_wait<0>();
      __syncwarp();
      UNROLL for (int k = 0; k < FRAGMENTS && first + k < IN_REGISTERS; k++)
        load_four_matrices(registers[first + k], shared + k * 512);
      __syncwarp();
    }
  }
  // Copies fragments to shared memory by asynchronous copies of words, all in flight at once. Not unrolled: fetching
  // and compiling code that runs once takes longer than running it.
  template <class Tile>
  DEVICE void copy_shared(const scalar* R, const ThreadCoord& coord, Tile tile) {
#pragma unroll 1
    for (int f = 0; f < IN_SHARED; f++) {
      const int i = f * TOTAL / FRAGMENTS;
      UNROLL for (int r = 0; r < 4; r++) {
        const scalar* from = tile(i, 2 * coord.quad + r % 2, 2 * coord.lane_in_quad + r / 2 * 8);
        copy_async<4>(shared + f * 512 + r * 4, from ? from : R, from);
      }
    }
  }
  // Stores fragments to shared memory through registers. Unrolled if R is transposed; otherwise, the compiler would
  // recompute addresses in every time step.
  template <class Tile>
  DEVICE void load_shared(const ThreadCoord& coord, Tile tile) {
    constexpr int AT_ONCE = 8, UNROLLED = TRANSPOSED ? FRAGMENTS : 1;
#pragma unroll UNROLLED
    for (int first = 0; first < IN_SHARED; first += AT_ONCE) {
      Pair pairs[AT_ONCE][4];
      UNROLL for (int k = 0; k < AT_ONCE; k++)  // the last ones may repeat, which saves a branch
        read(pairs[k], min(first + k, IN_SHARED - 1) * TOTAL / FRAGMENTS / SPLITS, coord, tile);
      UNROLL for (int k = 0; k < AT_ONCE; k++) {
        if (first + k >= IN_SHARED) continue;
        u32 value[4];
        for (int split = 0; split <= (first + k) * TOTAL / FRAGMENTS % SPLITS; split++) next_splits(value, pairs[k]);
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                     ::"r"(shared + (first + k) * 512), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
                     : "memory");
      }
    }
  }
  // Returns the largest magnitude among the elements that the lane reads.
  template <class Tile>
  DEVICE float largest(const ThreadCoord& coord, Tile tile) const {
    float found = 0;
#pragma unroll 4
    for (int i = 0; i < TILES; i++) {
      Pair pairs[4];
      read(pairs, i, coord, tile);
      UNROLL for (int r = 0; r < 4; r++) found = max(found, pairs[r].magnitude());
    }
    return found;
  }
  // Reads the lane's elements of tile i in the order of a fragment's registers.
  template <class Tile>
  DEVICE void read(Pair (&pairs)[4], int i, const ThreadCoord& coord, Tile tile) const {
    // Columns 2j, 2j + 1 and 2j + 8, 2j + 9 of the fragment, j = lane_in_quad.
    UNROLL for (int half = 0; half < 2; half++) {
      int column = 2 * coord.lane_in_quad + half * 8;
      Pair &even = pairs[2 * half], &odd = pairs[2 * half + 1];
      if constexpr (TRANSPOSED) {
        ::load(even, tile(i, column, 2 * coord.quad));
        ::load(odd, tile(i, column + 1, 2 * coord.quad));
        transpose(even, odd);
      } else {
        ::load(even, tile(i, 2 * coord.quad, column));
        ::load(odd, tile(i, 2 * coord.quad + 1, column));
      }
      if constexpr (SCALED) even.multiply(scale.up), odd.multiply(scale.up);
    }
  }
  // Returns the next split of each pair.
  static DEVICE void next_splits(u32 (&value)[4], Pair (&pairs)[4]) {
    UNROLL for (int r = 0; r < 4; r++) value[r] = pairs[r].next_split();
  }
  // Shared fragments in flight, AHEAD of their use, so that products hide the latency.
  static constexpr int AHEAD = TOTAL > IN_REGISTERS ? 3 : 0;
  struct Queue {
    u32 words[AHEAD + 1][4];
  };
  // Starts to load a shared fragment into the queue.
  DEVICE void fetch(Queue& queue, int shared_fragment) const {
    if (shared_fragment >= TOTAL - IN_REGISTERS) return;
    u32(&a)[4] = queue.words[shared_fragment % (AHEAD + 1)];
    if constexpr (BY_ROWS) return load_four_matrices(a, shared + shared_fragment * 512);
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared + shared_fragment * 512));
  }
  // Fills the queue before the first product of a step.
  DEVICE void start(Queue& queue) const {
    UNROLL for (int i = 0; i < AHEAD; i++) fetch(queue, i);
  }
  // c[n] += tile i x b[.][n], for half `half` of the two k tiles in b. Must be called in the order of tiles.
  DEVICE void multiply(Queue& queue, float (&c)[BATCH_TILES][4], int i, const u32 (&b)[OPERANDS][BATCH_TILES][4],
                       int half) const {
    UNROLL for (int split = 0; split < SPLITS; split++) {
      const int f = i * SPLITS + split, in_shared = f - register_index(f);
      if (!in_registers(f)) fetch(queue, in_shared + AHEAD);
      UNROLL for (int other = 0; other < (PACKED ? 1 : SPLITS - split); other++)
        UNROLL for (int n = 0; n < BATCH_TILES; n++) {
          const u32(&right)[4] = b[other][n];
          if (in_registers(f)) mma(c[n], registers[register_index(f)], right[2 * half], right[2 * half + 1]);
          else mma(c[n], queue.words[in_shared % (AHEAD + 1)], right[2 * half], right[2 * half + 1]);
        }
    }
  }
};

// Returns the offset in bytes of the row of an operand tile whose address the lane passes to ldmatrix.
DEVICE u32 row_in_operand(const ThreadCoord& coord) {
  return ((coord.lane / 8) * OPERAND_COLUMNS + coord.lane % 8) * 16;
}

// The same as `product` below, given the address of the lane's row of the operand.
template <int M, int K_TILES, int SPLIT_BYTES, class F>
DEVICE void product_of_rows(float (&c)[M][BATCH_TILES][4], const F& fragments, typename F::Queue& queue, int first,
                            u32 row) {
  constexpr int CHAINS = M * BATCH_TILES >= 4 || K_TILES < 2 ? 1 : 4 / (M * BATCH_TILES);
  float part[CHAINS][M][BATCH_TILES][4] = {};
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < BATCH_TILES; n++)
      UNROLL for (int r = 0; r < 4; r++) part[0][m][n][r] = c[m][n][r];
  UNROLL for (int k = 0; k < K_TILES; k += 2) {
    u32 b[OPERANDS][BATCH_TILES][4];
    UNROLL for (int split = 0; split < OPERANDS; split++)
      UNROLL for (int n = 0; n < BATCH_TILES; n++) {
        u32 from = row + split * SPLIT_BYTES + (k * 2 * OPERAND_COLUMNS + n * 8) * 16;
        if (k + 1 == K_TILES) load_two_matrices(b[split][n][0], b[split][n][1], from);
        else load_four_matrices(b[split][n], from);
      }
    UNROLL for (int half = 0; half < 2 && k + half < K_TILES; half++)
      UNROLL for (int m = 0; m < M; m++)
        fragments.multiply(queue, part[(k + half) % CHAINS][m], first + (k + half) * M + m, b, half);
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int n = 0; n < BATCH_TILES; n++)
      UNROLL for (int r = 0; r < 4; r++) {
        float sum = part[0][m][n][r];
        UNROLL for (int s = 1; s < CHAINS; s++) sum += part[s][m][n][r];
        c[m][n][r] = sum;
      }
}

// c[m][n] += sum over k of tile (m, k) x operand tile (k, n), for K_TILES tiles of 16 rows of the operand, which begins
// at `address`. Splits of the operand are SPLIT_BYTES apart. Tile (m, k) is number first + k * M + m of `fragments`. If
// M is small, CHAINS independent chains of mma per result keep the tensor cores busy. The operand must be visible to
// the warp.
template <int M, int K_TILES, int SPLIT_BYTES, class F>
DEVICE void product(float (&c)[M][BATCH_TILES][4], const F& fragments, typename F::Queue& queue, int first, u32 address,
                    const ThreadCoord& coord) {
  product_of_rows<M, K_TILES, SPLIT_BYTES>(c, fragments, queue, first, address + row_in_operand(coord));
}

// PACKED: adds the sums of the columns that hold the second split to those of the first.
template <int M>
DEVICE void add_splits(float (&c)[M][BATCH_TILES][4]) {
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int r = 0; r < 4; r++) c[m][0][r] += __shfl_xor_sync(~0u, c[m][0][r], 2);
}
