// Asynchronous products of a warpgroup (four warps) with both operands in shared memory: wgmma, sm_90a.
#pragma once
#include "kernels/common.cuh"

constexpr int BLOCK_COLUMNS = 64, BLOCK_ROW = 2 * BLOCK_COLUMNS;  // of a matrix's blocks; bytes
// Returns the offset of a 16-byte vector in a block: vector v of row r is at position v ^ r % 8 of the row (128-byte
// swizzle).
DEVICE constexpr int swizzled(int row, int vector) { return row * BLOCK_ROW + (vector ^ row % 8) * 16; }

// Returns the descriptor of a matrix of 2-byte elements whose rows are the inner axis of the product. Its blocks of
// columns are `apart` bytes apart and 1024-byte aligned.
DEVICE u64 matrix(u32 address, int apart) {
  constexpr u64 SWIZZLE_128 = 1, EIGHT_ROWS = 8 * BLOCK_ROW;
  return (address & 0x3ffff) >> 4 | u64(apart >> 4) << 16 | EIGHT_ROWS >> 4 << 32 | SWIZZLE_128 << 62;
}
// Returns the descriptor of the same matrix beginning at `row`, a multiple of 8.
DEVICE u64 from_row(u64 matrix, int row) { return matrix + (row * BLOCK_ROW >> 4); }

// c [64 x COLUMNS] += a^T b, or = if not ADDS, for 16 rows of a (one block) and of b. With q = lane / 4 and l = lane %
// 4, a lane of warp w has in c[4i + r], r = 0 to 3, row 16 w + q + 8 (r / 2), column 8i + 2l + r % 2. WGMMA may be two
// instructions; the second one multiplies the columns from SECOND_COLUMN on.
template <bool ADDS>
DEVICE void warpgroup_mma(float (&c)[COLUMNS / 2], u64 a, u64 b) {
  const u64 second = b + (SECOND_COLUMN / BLOCK_COLUMNS * ROWS * BLOCK_ROW >> 4);
  asm volatile("{.reg .pred add; " WGMMA "}" : WGMMA_SUMS(c) : "l"(a), "l"(b), "l"(second), "n"(ADDS));
}
// Must be called before the first product if other instructions have accessed c.
DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Waits for all products. Takes c as an operand, so that the compiler does not read it earlier.
DEVICE void warpgroup_wait_for(float (&c)[COLUMNS / 2]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : WGMMA_SUMS(c) :: "memory");
}
// Makes this thread's copies and stores to shared memory visible to the products (the async proxy).
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
