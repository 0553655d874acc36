// Products of a warpgroup, four warps, with operands in shared memory (sm_90a): they go on while the warps do something else.
#pragma once
#include "kernels/common.cuh"

constexpr int BLOCK_COLUMNS = 64, BLOCK_ROW = 2 * BLOCK_COLUMNS;  // of a matrix's blocks; bytes
// Where 16 bytes, vector v of row r of a block, stand in it: number v ^ r % 8 of the row, so that eight rows use all banks.
DEVICE constexpr int swizzled(int row, int vector) { return row * BLOCK_ROW + (vector ^ row % 8) * 16; }

// Rows of 2-byte elements, the product's inner axis: columns in blocks `apart` bytes from each other, 1024-byte aligned.
DEVICE u64 matrix(u32 address, int apart) {
  constexpr u64 SWIZZLE_128 = 1, EIGHT_ROWS = 8 * BLOCK_ROW;
  return (address & 0x3ffff) >> 4 | u64(apart >> 4) << 16 | EIGHT_ROWS >> 4 << 32 | SWIZZLE_128 << 62;
}
// The same from a row on that is a multiple of 8.
DEVICE u64 from_row(u64 matrix, int row) { return matrix + (row * BLOCK_ROW >> 4); }

// c [64 x COLUMNS] += a^T b for 16 rows of a, one block, and of b. Lane (g, t) of warp w holds rows 16 w + g, the same, and
// two of 8 more, of columns 8 i + 2 t and the next. If not ADDS, c = a^T b.
template <bool ADDS>
DEVICE void warpgroup_mma(float (&c)[COLUMNS / 2], u64 a, u64 b) {
  asm volatile("{.reg .pred add; " WGMMA "}" : WGMMA_SUMS(c) : "l"(a), "l"(b), "n"(ADDS));
}
// Before the first product of several, if others have used c.
DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// For all, of which c is read next: not before.
DEVICE void warpgroup_wait_for(float (&c)[COLUMNS / 2]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : WGMMA_SUMS(c) :: "memory");
}
// Lets products see what the thread has copied or stored to shared memory.
DEVICE void copies_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
