// Pads or truncates the rows of several tensors in one launch; bound by memory bandwidth.
#pragma once
#include "kernels/memory.cuh"

constexpr int IN_VECTOR = 8;  // 16-bit elements in a vector of 16 bytes

// One tensor, in units of 16 bits (larger types have several): x [.., of_x, from] -> resized [.., of_resized, to], with
// `rows` rows in all. Rows and matrices are padded with zeros or truncated.
struct Resize {
  const u16* x;
  u16* resized;
  i64 rows, from, to, of_x, of_resized;
  i64 groups;   // of eight rows, which are whole vectors: a thread writes the same vector of every `at_once`-th group
  i64 at_once;  // the remaining rows are written element by element
  i64 blocks;
  DEVICE int blocks_of_groups() const { return int(at_once * to + BLOCK_THREADS - 1) / BLOCK_THREADS; }
};

// Returns a mask of the bits of word i of a vector that belong to its first `number` elements.
DEVICE u32 bits_of_first(int number, int i) { return number >= 2 * i + 2 ? ~0u : number == 2 * i + 1 ? 0xffffu : 0u; }

// Elements begin <= k < end of a vector; element k is at from[k]. They lie in five aligned words, which are shifted by
// one element if `from` is odd.
struct Part {
  const u32* words;
  u32 order, mask[4];
  DEVICE Part(const u16* from, int begin, int end) {
    const bool odd = reinterpret_cast<u64>(from) & 2;
    words = reinterpret_cast<const u32*>(from - odd), order = odd ? 0x5432 : 0x3210;
    UNROLL for (int i = 0; i < 4; i++) mask[i] = bits_of_first(end, i) & ~bits_of_first(begin, i);
  }
  // Sets these elements of `vector`, read `offset` words further on.
  DEVICE void add_to(u32 (&vector)[4], i64 offset) const {
    u32 found[5];
    UNROLL for (int i = 0; i < 5; i++) found[i] = __ldg(words + offset + i);
    UNROLL for (int i = 0; i < 4; i++) vector[i] |= __byte_perm(found[i], found[i + 1], order) & mask[i];
  }
};

// Writes the thread's vector in each of its groups. A vector may contain the end of one row and the beginning of the
// next.
DEVICE void resize_groups(const Resize& job, int thread) {
  const int from = job.from, to = job.to, at_once = job.at_once, first = thread / to, vector = thread - first * to;
  if (first >= at_once) return;
  // left: to the row's end
  const int row = vector * IN_VECTOR / to, column = vector * IN_VECTOR - row * to, left = to - column;
  const u16* x = job.x + (i64(first) * IN_VECTOR + row) * from;
  const Part before(x + column, 0, min(left, from - column)), after(x + from - left, left, left + from);
  uint4* resized = reinterpret_cast<uint4*>(job.resized) + i64(first) * to + vector;
  const i64 step = i64(at_once) * (IN_VECTOR / 2) * from, result_step = i64(at_once) * to;
  const int count = (int(job.groups) - first + at_once - 1) / at_once;
  auto write = [&](bool ends) {
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      u32 found[4] = {};
      before.add_to(found, i * step);
      if (ends) after.add_to(found, i * step);
      resized[i * result_step] = make_uint4(found[0], found[1], found[2], found[3]);
    }
  };
  if (to % IN_VECTOR) write(true);
  else write(false);
}

// Writes the eight elements from `first` on, a multiple of eight. All loads are in flight at once.
DEVICE void resize_elements(const Resize& job, i64 first) {
  const i64 end = job.rows * job.to;
  if (first >= end) return;
  const i64 row = first / job.to;
  i64 column = first - row * job.to, matrix = row < job.of_resized ? 0 : row / job.of_resized;
  i64 of_matrix = row - matrix * job.of_resized;
  alignas(16) u16 found[IN_VECTOR];
  UNROLL for (int k = 0; k < IN_VECTOR; k++) {
    const bool exists = first + k < end && column < job.from && of_matrix < job.of_x;
    found[k] = exists ? __ldg(job.x + (matrix * job.of_x + of_matrix) * job.from + column) : 0;
    if (++column == job.to) column = 0, of_matrix++;
    if (of_matrix == job.of_resized) of_matrix = 0, matrix++;
  }
  if (first + IN_VECTOR <= end) {
    *reinterpret_cast<uint4*>(job.resized + first) = *reinterpret_cast<const uint4*>(found);
  } else {
    UNROLL for (int k = 0; k < IN_VECTOR; k++)
      if (first + k < end) job.resized[first + k] = found[k];
  }
}

// Params: types and shapes are in resize_rows.py. The blocks of each tensor follow those of the previous tensor.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
flashrnn_resize_rows(PARAMETERS) {
  const Resize tensors[] = {PARAMETER_NAMES};
  Resize job = tensors[0];
  int block = blockIdx.x;
  bool found = block < job.blocks;
  UNROLL for (int i = 1; i < sizeof(tensors) / sizeof(Resize); i++) {
    if (!found) block -= job.blocks, job = tensors[i], found = block < job.blocks;
  }
#if __CUDA_ARCH__ >= 900  // a programmatic dependent launch: the previous kernel may still access the tensors
  wait_for_primary();
  asm_fence(job.x);  // no load moves to before that
#endif
  const int of_groups = job.blocks_of_groups();
  if (block < of_groups) return resize_groups(job, block * BLOCK_THREADS + threadIdx.x);
  resize_elements(job, (job.groups * job.to + i64(block - of_groups) * BLOCK_THREADS + threadIdx.x) * IN_VECTOR);
}
