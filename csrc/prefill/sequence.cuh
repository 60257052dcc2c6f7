// Where a chunk's tokens are: sequences, prefixes and slots (workspace.h); and what every path does with tokens of no sequence and with gates.
#pragma once
#include "../common/primitives.cuh"
#include "../common/rows.cuh"
#include "workspace.h"

namespace gdn {

struct Sequence {
  int64_t begin, length;  // in the packed tokens
  int64_t prefix;
  int64_t read, write, starts;
  int lead;               // rows of padding before the first token
  int64_t chunks;

  // Its first slot, of so many tokens each.
  __device__ __forceinline__ int64_t slot(int index, int64_t tokens = kChunk) const { return begin / tokens + 2 * int64_t(index); }
  // Token of row 0 of chunk c; the rows of the chunk that are tokens are those from `from` to `to`.
  __device__ __forceinline__ int64_t first_token(int64_t c) const { return begin - lead + c * kChunk; }
  __device__ __forceinline__ int from(int64_t c) const { return c == 0 ? lead : 0; }
  __device__ __forceinline__ int to(int64_t c) const {
    const int64_t left = lead + length - c * kChunk;
    return left < kChunk ? int(left) : kChunk;
  }
};

__device__ __forceinline__ Sequence get_sequence(const PrefillParams& p, int i) {
  Sequence s;
  s.begin = load_index(p.cu_seqlens, i);
  s.length = load_index(p.cu_seqlens, i + 1) - s.begin;
  if (p.pages.indices.data != nullptr) {
    const PrefillRows rows = prefill_rows(p.pages, i, s.length);
    s.read = rows.read, s.write = rows.write, s.starts = rows.starts, s.prefix = rows.prefix;
  } else {
    s.read = p.read_rows.data != nullptr ? load_index(p.read_rows, i) : i;
    s.write = p.write_rows.data != nullptr ? load_index(p.write_rows, i) : i;
    s.starts = p.checkpoint_starts.data != nullptr ? load_index(p.checkpoint_starts, i) : 0;
    s.prefix = p.prefix_lens.data != nullptr ? load_index(p.prefix_lens, i) : 0;
  }
  s.lead = int(s.prefix % kChunk);
  s.chunks = s.length > 0 ? (s.lead + s.length + kChunk - 1) / kChunk : 0;
  return s;
}

// Whether a sequence has more than one segment of so many chunks; no sequence: no.
__device__ __forceinline__ bool is_split(const PrefillParams& p, int64_t i, int32_t segment) { return i < p.num_seqs && get_sequence(p, int(i)).chunks > segment; }

// The sequence that a slot of so many tokens may belong to, or -1; all lanes of a warp together, 32 candidates a step.
__device__ __forceinline__ int find_sequence(const PrefillParams& p, int64_t slot, int64_t tokens = kChunk) {
  const int lane = threadIdx.x % 32;
  const auto first_slot = [&](int i) { return load_index(p.cu_seqlens, i) / tokens + 2 * int64_t(i); };
  int low = 0, high = p.num_seqs;  // the answer is in [low, high), if there is one
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int64_t candidate = low + int64_t(lane + 1) * step;
    const bool before = candidate < high && first_slot(int(candidate)) <= slot;
    low += __popc(__ballot_sync(0xffffffffu, before)) * step;
    high = high < low + step ? high : low + step;
  }
  return first_slot(low) <= slot ? low : -1;
}

// Chunks from a boundary to the next; none is further away than any sequence is long.
__device__ __forceinline__ int32_t boundary_every(const PrefillParams& p) {
  const auto interval = uint64_t(p.checkpoint_every) / kChunk;
  return interval < uint64_t(INT32_MAX) ? int32_t(interval) : INT32_MAX;
}
// How many chunks from one of a sequence's on the next boundary is, that chunk included; and the list's entry for it.
__device__ __forceinline__ void find_boundary(const PrefillParams& p, const Sequence& sequence, int64_t chunk, int& until, int64_t& entry) {
  const uint32_t every = boundary_every(p);
  const uint32_t behind = uint32_t(sequence.prefix / kChunk) % every + uint32_t(chunk);  // no division of 64 bits: such take long
  entry = sequence.starts + behind / every;
  until = int32_t(every - behind % every);
}
__device__ __forceinline__ const Index& checkpoint_rows(const PrefillParams& p) {
  return p.pages.indices.data != nullptr ? p.pages.indices : p.checkpoint_rows;
}

// Rows of output that belong to no sequence, dealt out to all CTAs.
__device__ __forceinline__ void zero_rest(const PrefillParams& p, int head_size) {
  const int64_t begin = load_index(p.cu_seqlens, 0), end = load_index(p.cu_seqlens, p.num_seqs);
  const int64_t rest = begin + p.num_tokens - end;
  for (int64_t i = blockIdx.x; i < rest; i += gridDim.x) {
    const int64_t token = i < begin ? i : end + i - begin;
    auto* row = static_cast<uint16_t*>(p.output) + token * p.output_stride.token;
    for (int j = threadIdx.x; j < p.heads * head_size; j += blockDim.x) row[j / head_size * p.output_stride.head + j % head_size] = 0;
  }
}

// From each token's log2(alpha), and whether alpha is 0, to their sums from the chunk's start to the token; returns the number of zeros. A warp,
// lane l for tokens l and l + 32.
__device__ __forceinline__ int add_up_gates(float (&sum)[2], int (&zeros)[2], int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float before = __shfl_up_sync(0xffffffffu, sum[i], offset);
      if (lane >= offset) sum[i] += before;
    }
  // alpha = 0 is rare: the tokens up to each are counted by votes.
  const uint32_t low = __ballot_sync(0xffffffffu, zeros[0] != 0), high = __ballot_sync(0xffffffffu, zeros[1] != 0);
  const uint32_t mask = 0xffffffffu >> (31 - lane);
  zeros[0] = __popc(low & mask), zeros[1] = __popc(low) + __popc(high & mask);
  sum[1] += __shfl_sync(0xffffffffu, sum[0], 31);
  return __popc(low) + __popc(high);
}

}  // namespace gdn
