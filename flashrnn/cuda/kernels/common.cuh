// Types and thin wrappers of instructions that all kernels use.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

DEVICE u32 pack_halves(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<u32*>(&pair);
}
DEVICE float2 unpack_halves(u32 pair) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }
DEVICE float2 unpack_bfloats(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// `scalar` is the type of inputs and outputs, `operand` the type that the tensor cores multiply. A float is split into
// SPLITS operands:
// - bf16x3 (default): three bfloat16 numbers of 8 bits each. The 6 largest of the 9 products leave an error of 2^-23.
// - TF32 precision allowed (error 2^-10): two bfloat16 numbers. The 3 largest of the 4 products leave 2^-16. A TF32
//   instruction would read as many bytes and take two thirds of the tensor cores' time, but its fragments differ from
//   those of the other types.
// - SCALED (fp16x2): two float16 numbers of 11 bits each, of which 3 products leave at most 2^-20. That is half of the
//   products and two thirds of the bytes of bf16x3. Because float16 has a small range, operands are first multiplied by
//   a power of two (`Scale`).
#if defined(SCALAR_F16) || defined(SCALAR_SCALED)
using operand = __half;
DEVICE u32 pack(float low, float high) { return pack_halves(low, high); }
DEVICE float2 unpack(u32 pair) { return unpack_halves(pair); }
#define MMA_TYPE "f16"
#else
using operand = __nv_bfloat16;
DEVICE u32 pack(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<u32*>(&pair);
}
DEVICE float2 unpack(u32 pair) { return unpack_bfloats(pair); }
#define MMA_TYPE "bf16"
#endif
#ifdef SCALAR_F16
using scalar = __half;
#elif defined(SCALAR_BF16)
using scalar = __nv_bfloat16;
#else
using scalar = float;
#endif
constexpr int BYTES = sizeof(scalar);
#ifdef SCALAR_SCALED
constexpr bool SCALED = true;
#else
constexpr bool SCALED = false;
#endif
#ifdef SCALAR_TF32
constexpr bool TF32 = true;
#else
constexpr bool TF32 = false;
#endif
constexpr int SPLITS = BYTES == 2 ? 1 : TF32 || SCALED ? 2 : 3;

// The type in which the forward stores gates, and states that are not results, for the backward.
template <int>
struct GateOf { using type = __half; };
template <>
struct GateOf<4> { using type = float; };
using gate = GateOf<BYTES>::type;
// Packs two gates into a word. Values beyond the range of float16 saturate, so that they stay finite.
DEVICE u32 pack_gates(float low, float high) {
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Converts one gate, with saturation.
DEVICE void to_gate(float& gate, float x) { gate = x; }
DEVICE void to_gate(__half& gate, float x) { gate = __ushort_as_half(static_cast<u16>(pack_gates(x, 0))); }

// A pair of neighbouring scalars. For float, each call of next_split returns the next 8 (SCALED: 11) leading bits of
// both, as two operands in a word.
template <class S>
struct PairOf {
  u32 word;
  DEVICE void round(float low, float high) { word = pack(low, high); }
  DEVICE u32 next_split() const { return word; }
  DEVICE void multiply(float) {}  // only floats are SCALED
  DEVICE float magnitude() const { return 0; }
};
template <>
struct PairOf<float> {
  float low, high;
  DEVICE void round(float new_low, float new_high) { low = new_low, high = new_high; }
  DEVICE u32 next_split() {
    u32 word = pack(low, high);
    float2 rounded = unpack(word);
    low -= rounded.x, high -= rounded.y;
    return word;
  }
  DEVICE void multiply(float factor) { low *= factor, high *= factor; }
  DEVICE float magnitude() const { return max(fabsf(low), fabsf(high)); }
};
using Pair = PairOf<scalar>;

// Transposes the 2 x 2 matrix whose rows are (a.low, a.high) and (b.low, b.high).
DEVICE void transpose(PairOf<float>& a, PairOf<float>& b) {
  float high = a.high;
  a.high = b.low, b.low = high;
}
template <class S>
DEVICE void transpose(PairOf<S>& a, PairOf<S>& b) {
  u32 first = a.word, second = b.word;
  a.word = __byte_perm(first, second, 0x5410), b.word = __byte_perm(first, second, 0x7632);
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. With q = lane / 4 (quad) and l = lane % 4 (lane_in_quad), a lane holds
// - c[0..3]: rows q, q, q + 8, q + 8, columns 2l, 2l + 1, 2l, 2l + 1;
// - a[r]: row q + 8 (r % 2), columns 2l + 8 (r / 2) and the next;
// - b[r]: rows 2l + 8r and the next, column q.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Returns the sums of `value` over the lanes of quads 2l and 2l + 1, l = lane_in_quad: the product of a matrix of ones
// and the values. Each value is split into two TF32 numbers, so that 22 of its bits count. All lanes of the warp call
// this.
DEVICE float2 sum_of_quads(float value) {
  const u32 high = __float_as_uint(value) & 0xffffe000;
  const float low = value - __uint_as_float(high);
  float c[4] = {};
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(0x3f800000), "r"(high), "r"(__float_as_uint(low)));
  return make_float2(c[0], c[1]);
}

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ldmatrix: loads four (two) 8 x 8 matrices of 2-byte elements. Each lane passes the address of a row of 16 bytes.
DEVICE void load_four_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_two_matrices(u32& r0, u32& r1, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1) : "r"(address) : "memory");
}

// Loads four such matrices transposed.
DEVICE void load_four_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Starts an asynchronous copy of BYTES (4, 8 or 16) bytes from global to shared memory; writes zeros if not `valid`.
template <int BYTES>
DEVICE void copy_async(u32 to, const void* from, bool valid) {
  int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
  }
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Loads a pair from read-only memory, zeros for a null pointer. Volatile, so that the compiler keeps few addresses
// live.
DEVICE void load(PairOf<float>& pair, const scalar* from) {
  asm volatile("{.reg .pred p; setp.ne.u64 p, %2, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;\n"
               "@p ld.global.nc.v2.f32 {%0,%1}, [%2];}" : "=f"(pair.low), "=f"(pair.high) : "l"(from));
}
template <class S>
DEVICE void load(PairOf<S>& pair, const scalar* from) {
  asm volatile("{.reg .pred p; setp.ne.u64 p, %1, 0; mov.u32 %0, 0; @p ld.global.nc.u32 %0, [%1];}"
               : "=r"(pair.word) : "l"(from));
}

template <class T>
DEVICE void advance(T*& pointer, i64 bytes) {
  pointer = reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
}

// Prevents the compiler from recomputing x at each use.
DEVICE void asm_fence(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE void asm_fence(i64& x) { asm volatile("" : "+l"(x)); }
// The same for a pointer that the compiler still knows to point to global memory.
template <class T>
DEVICE void asm_fence(T*& pointer) {
  size_t address = __cvta_generic_to_global(pointer);
  asm volatile("" : "+l"(address));
  pointer = static_cast<T*>(__cvta_global_to_generic(address));
}

DEVICE void store_shared(u32 address, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
DEVICE void store_shared(u32 address, uint2 words) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(words.x), "r"(words.y) : "memory");
}
DEVICE void store_shared(u32 address, u16 half) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(half) : "memory");
}

DEVICE uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

DEVICE void load_shared(uint4& v, u32 address) { v = load_shared(address); }
DEVICE void load_shared(uint2& v, u32 address) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
}
DEVICE void load_shared(u32& v, u32 address) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
}

// Called by all threads of a warpgroup: requests REGISTERS registers per thread, from those that other warpgroups have
// released.
template <int REGISTERS>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
// Called by all threads of a warpgroup: releases registers, down to REGISTERS per thread.
template <int REGISTERS>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Synchronises THREADS threads that pass the same barrier id.
template <int THREADS>
DEVICE void named_barrier(int id) {
  if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
  }
}
