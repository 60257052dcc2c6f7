// What the first stage of a prefill leaves for the second, and where.
//
// A chunk is 64 tokens at absolute positions: a sequence whose prefix ends inside a chunk begins with some rows of
// padding, so that a restart from any page boundary cuts the sequence where the first pass cut it. How many chunks a
// sequence has is known only on the device. Chunk c of sequence i gets slot cu_seqlens[i] / 64 + 2 i + c: sequences never
// overlap, since one of n tokens has at most n / 64 + 2 chunks, and a slot leads back to its sequence by a search for the
// largest i whose first slot is not beyond it. So there is one launch, no scan and no word to the host.
//
// A slot and head holds, in the notation of chunks.cu:
//   coupling  the strictly lower part of (I + L)^-1, 16 bits, as B fragments of m16n8k16 products
//   scores    the lower part of scale * Q K^T with decays, the same
//   gates     float32: decay from the chunk's start [64], beta [64], decay to the chunk's end [64]
// Only the 20 blocks [8 tokens, 16 tokens] on or below the diagonal are kept: 11 KB a chunk and head. In fragment order a
// warp writes and reads whole lines, and the second stage needs neither a swizzle nor ldmatrix for them.
#pragma once
#include "../common/params.h"

namespace gdn {

constexpr int kChunk = 64;
constexpr int kBlocks = 20;
constexpr int kBlockWords = 64;  // two 32-bit words a lane
constexpr int kMatrixBytes = kBlocks * kBlockWords * 4;
constexpr int kGateBytes = 3 * kChunk * 4;
constexpr int kSlotBytes = 2 * kMatrixBytes + kGateBytes;

// Block of output tokens [8 n, 8 n + 8) and source tokens [16 k, 16 k + 16), k <= n / 2.
__host__ __device__ constexpr int block_index(int n, int k) { return (n / 2 + 1) * (n / 2 + n % 2) + k; }

// How a call is cut up; made by launch.cu.
struct PrefillPlan {
  int64_t slots;
  int32_t first_head, heads;   // of this pass: passes bound the workspace
  int32_t heads_a_block;       // stage 1: state heads that share one CTA's q and k
  int32_t rows;                // stage 2: V rows a CTA
  int32_t stages;              // stage 2: chunks of shared memory
  bool packed_q, packed_k;     // stage 2 reads q, k from the workspace: normalised there, or not aligned in place
  char *chunks;                // [slots, heads of the pass, kSlotBytes]
  char *q_tiles, *k_tiles;     // [slots, all heads of q or k, 64, K], where packed

  __host__ __device__ char* chunk(int64_t slot, int head) const {
    return chunks + (slot * heads + (head - first_head)) * kSlotBytes;
  }
};

void launch_chunks(const PrefillParams& params, const PrefillPlan& plan, cudaStream_t stream);
void launch_recurrence(const PrefillParams& params, const PrefillPlan& plan, cudaStream_t stream);
void launch_fused(const PrefillParams& params, cudaStream_t stream);  // both in one, without scratch

}  // namespace gdn
