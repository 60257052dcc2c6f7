// Prefill on sm_90a: what its kernels leave for each other, and where. Chunks and their slots are those of workspace.h; what
// lies in a slot is made for the copy engine: contiguous pieces that are, byte for byte, what wgmma wants in shared memory.
//
//   tiles    of q and of k, rows that are no tokens zero: [64, 128] 16-bit as two halves of 64 columns, rows of 128 bytes, the last 16 first,
//            16-byte piece c of row r at place c ^ (r % 8). Only where the recurrence cannot take q and k from the caller's tensors
//            (Plan::raw). Norms, or other factors of rows, are in the gates and products.
//   record   of a state head: coupling, gates, scores, in shared memory as they are here. Matrices as 8x8 tiles of 128 bytes. For source tokens 16 k to
//            16 k + 15, the target tokens from 16 k on, the last 16 first, eight at a time, two tiles each (sources 16 k and 16 k + 8): what
//            lies above the diagonal is not stored. Gates: gamma, scale * gamma, tail [64 each], times the factors of their rows of k, q, k;
//            the decay over the whole chunk; the logarithm of what the norm of the chunk's transition cannot exceed; and beta (kBetaAtSources).
#pragma once
#include <cuda_fp16.h>

#include <type_traits>

#include "../common/tensor_map.h"
#include "workspace.h"

// Whether this library has these kernels: it is for one architecture (backends/cuda/build.py).
#if defined(GDN_EMULATE)
#define GDN_SM90 1
#elif defined(__CUDA_ARCH_LIST__)
#define GDN_SM90 ((__CUDA_ARCH_LIST__) == 900)
#else
#define GDN_SM90 0
#endif

namespace gdn {
namespace sm90 {

constexpr int kHead = 128;                          // K = V
constexpr int kTileBytes = kChunk * kHead * 2;      // of q, k
// Where columns 16 k.. of a tile's image begin, as an operand whose rows are the tile's.
__host__ __device__ constexpr int columns_at(int k) { return k / 4 * 8192 + k % 4 * 32; }
constexpr int kTriangleBytes = 20 * 2 * 128;        // a matrix without what lies above the diagonal
// Where beta goes. U = beta W, W = (I + N)^-1 (V - gamma X), and N is triangular with beta at the sources: so consumers need not multiply with beta, if
// scores and tail do. Where operands are fp16 it stays with Y = beta (V - gamma X) and U itself: scores times a small beta would leave fp16's range.
template <class M>
constexpr bool kBetaAtSources = !std::is_same_v<M, __half>;
// Gates: arrays of 64; behind three the decay over the chunk and the bound, of a whole sector as all that is written; then beta, unless it is at the sources.
enum GateArray { kGamma, kScaleGamma, kTail, kGateArrays };
constexpr int kDecayAt = kGateArrays * kChunk, kBoundAt = kDecayAt + 1, kBetaAt = kDecayAt + 8, kGateFloats = kBetaAt + kChunk;
template <class M>
constexpr int kGateBytes = (kBetaAtSources<M> ? kBetaAt : kGateFloats) * 4;
constexpr int kGatesAt = kTriangleBytes;
constexpr int kScoresAt = kGatesAt + 1152;          // a multiple of 128
constexpr int kRecordBytes = kScoresAt + kTriangleBytes;
static_assert(kGateFloats * 4 <= 1152 && kRecordBytes % 128 == 0, "layout");

// In accumulators and operands of the recurrence, and in its tiles of k and q, a chunk's tokens are by groups of 16, the last group first. So the
// targets of a source are the first columns of a product, and a product with a triangle may leave out the others. (Of accumulators a product can take
// the first, but not the last: the assembler would copy them.)
__host__ __device__ constexpr int reversed_row(int row) { return row ^ 48; }
__host__ __device__ constexpr int reversed_tile(int n) { return n ^ 6; }  // of 8 tokens

// Where the strip of source tokens 16 k.. begins in a triangle.
__host__ __device__ constexpr int strip_at(int k) { return (8 * k - k * (k - 1)) * 256; }

// Which way a call goes. From shapes alone: heuristics on the host, prefill_heuristics.py.
struct Path {
  int32_t rows;     // V rows a CTA: 128 or 64
  int32_t segment;  // chunks a segment of a split sequence; 0: not split
  bool half;        // operands of products in fp16 for bf16 inputs too
};

struct Plan {
  Path path;
  int64_t slots, segments;    // of chunks, of segments
  int32_t first_head, heads;  // of this pass
  int32_t heads_a_block;
  bool output_aligned;        // every head of output starts at a multiple of 16 bytes
  bool mapped;                // the copy engine can read q and k in place
  bool raw;                   // and the recurrence does; there are tiles only of chunks that are cut short
  bool wide_gates;            // g and beta of four heads lie side by side, at a multiple of their size together
  bool staged;                // the recurrence's initial and final states go through the stages of shared memory, as chunks do
  char *records, *q_tiles, *k_tiles;
  // Split sequences: the state that a segment reaches from nothing, and its transition, [segments, heads, 2, 128, 128];
  // then, in place of the former, the state that the segment starts from.
  float* states;
  int32_t* nonzero;  // [segments, heads]: whether the transition is not zero to the last bit
  uint32_t* dealt;   // [2]: units of the first pass and of the recurrence that CTAs have taken; the first kernel sets them to 0
  int32_t multiprocessors;
  bool few;             // so few chunks and heads that the first kernel's CTAs all start together
  float tokens_a_slot;  // on average
  TensorMap maps[2];    // mapped: of k and of q, boxes of 64 columns of a head by 64 tokens
  TensorMap groups[2];  // raw: the same by 16 tokens

  __host__ __device__ char* record(int64_t slot, int head) const {
    return records + (slot * heads + (head - first_head)) * kRecordBytes;
  }
  // Raw: which tile is that of a chunk whose rows are not all tokens of its sequence. A sequence has two such chunks at most: its first
  // where the rows begin with some that are none, and its last.
  static __host__ __device__ int64_t cut_tile(int sequence, bool in_front) { return 2 * int64_t(sequence) + !in_front; }
  __host__ __device__ float* segment_state(int64_t segment, int head, int which) const {
    return states + ((segment * heads + (head - first_head)) * 2 + which) * (kHead * kHead);
  }
};

// A transition, in its segment's state of number 1. Row r of it says what becomes of column r of a state: fp16 below a power of two of its own, which
// is the largest that does not exceed the row's largest element, so that 11 bits are left of what matters, however much a segment forgets. Of each 16 columns
// the four that a lane of the accumulators has are a piece of 8 bytes (2 q, 2 q + 1, 2 q + 8, 2 q + 9), and pieces are in the order in which
// the scan's warps multiply them: 64 rows by 8 pieces a warp, for each two of a lane's four rows of 16 a run of 16 bytes a lane.
struct Transition {
  static constexpr int factors_at = kHead * kHead * 2, bytes = factors_at + kHead * 4;  // float32, of rows

  static __host__ __device__ constexpr int piece(int row, int number) {
    const int warp = row / 64 * 4 + number / 8, lane = number % 8 * 4 + row / 4 % 4;
    return ((warp * 4 + row / 16 % 4) * 2 + row / 2 % 2) * 512 + lane * 16 + row % 2 * 8;
  }
};

// What the path in one kernel (sm90_pairs.cu) gets instead.
struct PairPlan {
  TensorMap q, k, v, output;  // boxes of 64 columns of a head by 16 tokens; v and output by 64
};

void launch_pairs(const PrefillParams& p, const PairPlan& plan, cudaStream_t stream);
void launch_chunks(const PrefillParams& p, const Plan& plan, cudaStream_t stream);
void launch_recurrence(const PrefillParams& p, const Plan& plan, cudaStream_t stream);
void launch_segments(const PrefillParams& p, const Plan& plan, cudaStream_t stream);  // first pass
void launch_scan(const PrefillParams& p, const Plan& plan, cudaStream_t stream);

// The path as launch.cu sees it: whether it serves a call, how much of p.workspace it wants, and the call.
bool serves(const PrefillParams& p);
int64_t workspace(const PrefillParams& p);
void launch(const PrefillParams& p, cudaStream_t stream);

}  // namespace sm90
}  // namespace gdn
