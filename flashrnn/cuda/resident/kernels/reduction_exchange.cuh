// How the blocks of a cluster or of a grid add up their parts of a reduction over units (unit_reductions.cuh).
#pragma once
#include "resident/kernels/unit_reductions.cuh"

// A cluster: in distributed shared memory.
template <class Part>
DEVICE void UnitReductions::send_partials(int number) const {
  const u32 to = shared_address(received) + buffer(number) * SEQS * RECEIVED_ROW * 4, barrier = barriers + buffer(number) * 8;
  for (int i = threadIdx.x; i < SEQUENCES * BLOCKS; i += THREADS) {
    const int sequence = i % SEQUENCES, rank = (coord.rank + i / SEQUENCES) % BLOCKS;
    Part total;
    total_of_block(total, sequence, parts_of(number));
    const u32 place = remote_address(to + (sequence * RECEIVED_ROW + coord.rank * 4 * Part::VECTORS) * 4, rank);
#pragma unroll
    for (int k = 0; k < Part::VECTORS; k++) {
      const float* four = total.words + 4 * k;
      send(place + 16 * k, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]), __float_as_uint(four[3])),
           remote_address(barrier, rank));
    }
  }
}

template <class Part>
DEVICE void UnitReductions::total_received(Part& total, int number, int sequence) const {
  const float* row = received + (buffer(number) * SEQS + sequence) * RECEIVED_ROW;
  Part other;
  total.load(row);  // whose shifts and maxima all lanes take
#pragma unroll
  for (int i = 0; i < Part::ADDED; i++) total.words[i] = 0;
#pragma unroll
  for (int i = 0; i < BLOCKS; i += 8) {
    const int rank = i + coord.quad;
    if (i + 8 > BLOCKS && rank >= BLOCKS) continue;
    other.load(row + rank * 4 * Part::VECTORS);
    total.add(other, real_units(rank * UNITS, UNITS));
  }
#pragma unroll
  for (int mask = 16; mask >= 4; mask /= 2) {
#pragma unroll
    for (int i = 0; i < Part::ADDED; i++) total.words[i] += __shfl_xor_sync(~0u, total.words[i], mask);
#pragma unroll
    for (int i = Part::ADDED + Part::MOMENTS; i < Part::WORDS; i++)
      total.words[i] = op_max(total.words[i], __shfl_xor_sync(~0u, total.words[i], mask));
  }
}

// A grid: in global memory.
template <class Part>
DEVICE void UnitReductions::publish(int number) const {
  if (threadIdx.x >= SEQS) return;
  Part total;
  total_of_block(total, threadIdx.x, parts_of(number));
  u64* to = published_by(number, threadIdx.x, coord.rank);
  auto word = [&](int i) { return i < 0 ? 0 : __float_as_uint(total.words[i < 0 ? 0 : i]); };
#pragma unroll
  for (int i = 0; i < Part::PAIRS; i++)
    publish_phase(to + i, make_uint2(word(i + Part::WORDS - 2 * Part::PAIRS), word(i + Part::WORDS - Part::PAIRS)), phase() ^ 1);
}

template <class Part>
DEVICE void UnitReductions::total_published(int number) const {
  for (int sequence = coord.warp; sequence < SEQS; sequence += WARPS) {
    Part total, other;
    float units = 0;
#pragma unroll
    for (int i = 0; i < Part::WORDS; i++) total.words[i] = i < Part::ADDED + Part::MOMENTS ? 0 : -INFINITY;
    for (int rank = coord.lane; rank < BLOCKS; rank += 32) {
      peek_partial(other, published_by(number, sequence, rank));
      const float more = real_units(rank * UNITS, UNITS);
      if (rank < 32) total = other;
      else total.add(other, more);
      units += more;
    }
    total.add_lanes(units);
    if (coord.lane == 0) store_results(total, sequence);
  }
}

template <class Part>
DEVICE void UnitReductions::peek_partial(Part& part, const u64* from) const {
  uint2 pairs[Part::PAIRS];
  bool all = false;
  while (!all) {
    all = true;
#pragma unroll
    for (int i = 0; i < Part::PAIRS; i++) peek_phase(pairs[i], from + i);
#pragma unroll
    for (int i = 0; i < Part::PAIRS; i++) all &= in_phase(pairs[i], phase() ^ 1);
  }
#pragma unroll
  for (int i = 0; i < Part::WORDS; i++) {
    const int at = i + 2 * Part::PAIRS - Part::WORDS;
    part.words[i] = __uint_as_float(at < Part::PAIRS ? pairs[at].x : pairs[at - Part::PAIRS].y);
  }
}
