// Prefill, first stage: what a chunk of 64 tokens needs that does not depend on the state. All chunks and heads at once.
//
// With G the running sum of log2(alpha) in the chunk and D[i, j] = 2^(G_i - G_j) for j <= i:
//     L        = strictly lower part of diag(beta) (K K^T * D)
//     coupling = (I + L)^-1 - I, strictly lower too
//     scores   = lower part of scale * (Q K^T * D)
// The recurrence then solves a chunk's delta rule with products alone: recurrence.cu. Keeping beta out of the inverse and
// the identity out of the coupling means that both are added in float32 there; only the off-diagonal part, small for
// normalised keys, is rounded to 16 bits.
//
// K K^T and Q K^T are shared by the state heads of a q and k head, so a CTA may take several of them. Four warps; warp w
// owns rows 16 w to 16 w + 15 of the products. The inverse goes by blocks of 16: warp w inverts diagonal block w by
// substitution in float32, then fills column w of blocks below it,
//     inverse[i, j] = -inverse[i, i] * sum over m from j to i - 1 of L[i, m] inverse[m, j],
// with TF32 products: ten bits of mantissa as fp16, and float32's range, since unnormalised keys make it grow.
//
// alpha = 0 has no logarithm. Such tokens (and those below 2^-300, which leave nothing of a float32) are counted
// instead: D is zero where a count differs between i and j, exactly, and G stays small and precise.
#include "chunk_steps.cuh"

namespace gdn {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadsAtMost = 4;

template <int K>
struct Shared {
  static constexpr int tile_bytes = kChunk * kTileRow<K>;
  // K's tile and then L; Q's tile and then the inverse; the gates.
  static constexpr int second = tile_bytes > kLowerBytes ? tile_bytes : kLowerBytes;
  static constexpr int gates = second + (tile_bytes > kInverseBytes ? tile_bytes : kInverseBytes);
  static constexpr int bytes = gates + kHeadsAtMost * kChunk * 3 * 4;
};

// A tile [64, K] of q or k into shared memory, rows that are no tokens as zeros; normalised, and copied out, if wanted.
template <class T, int K>
__device__ __forceinline__ void load_tile(uint8_t* tile, const void* data, int64_t stride, bool aligned, int64_t token, int from,
                                          int to, bool l2norm, char* copy) {
  constexpr int kLanes = K / 8, kRows = 32 * kWarps / kLanes, kSteps = kChunk / kRows;
  const int row0 = threadIdx.x / kLanes, column = threadIdx.x % kLanes * 8;
  uint4 x[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    const int row = row0 + i * kRows;
    x[i] = make_uint4(0, 0, 0, 0);
    if (row >= from && row < to) {
      const uint16_t* source = static_cast<const uint16_t*>(data) + (token + row) * stride + column;
      if (aligned) {
        x[i] = *reinterpret_cast<const uint4*>(source);
      } else {
        const auto pair = [&](int j) { return uint32_t(source[j]) | uint32_t(source[j + 1]) << 16; };
        x[i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    const int row = row0 + i * kRows;
    if (l2norm) normalise<T, kLanes>(x[i]);
    *reinterpret_cast<uint4*>(tile + row * kTileRow<K> + column * 2) = x[i];
    if (copy != nullptr) *reinterpret_cast<uint4*>(copy + (row * K + column) * 2) = x[i];
  }
}

// Grid: x = slot, y = share of the pass's heads.
template <class T, int K>
__global__ void __launch_bounds__(32 * kWarps) chunks(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillPlan plan) {
  using S = Shared<K>;
  GDN_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t slot = blockIdx.x;
  const int index = find_sequence(p, slot);
  if (index < 0) return;
  const Sequence sequence = get_sequence(p, index);
  const int64_t c = slot - sequence.slot(index);
  if (c >= sequence.chunks) return;
  const int64_t token = sequence.first_token(c);
  const int from = sequence.from(c), to = sequence.to(c);
  const int first_head = plan.first_head + blockIdx.y * plan.heads_a_block;
  const int kh = first_head / p.k_group, qh = first_head / p.q_group;

  uint8_t *k_tile = shared, *q_tile = shared + S::second;
  float *lower = reinterpret_cast<float*>(shared), *inverses = reinterpret_cast<float*>(shared + S::second);
  auto* gates = reinterpret_cast<Gates*>(shared + S::gates);

  GateBits gate_bits;
  if (warp < plan.heads_a_block) load_gates(gate_bits, p, token, from, to, first_head + warp);
  constexpr int kTile = kChunk * K * 2;
  const int heads_q = p.heads / p.q_group, heads_k = p.heads / p.k_group;
  // Of the CTAs that share a head of q or k, the one with its first state head keeps the copy.
  char* k_copy = plan.packed_k && first_head % p.k_group == 0 ? plan.k_tiles + (slot * heads_k + kh) * kTile : nullptr;
  char* q_copy = plan.packed_q && first_head % p.q_group == 0 ? plan.q_tiles + (slot * heads_q + qh) * kTile : nullptr;
  load_tile<T, K>(k_tile, static_cast<const uint16_t*>(p.k) + kh * p.k_stride.head, p.k_stride.token, p.k_aligned, token, from, to,
                  p.l2norm, k_copy);
  load_tile<T, K>(q_tile, static_cast<const uint16_t*>(p.q) + qh * p.q_stride.head, p.q_stride.token, p.q_aligned, token, from, to,
                  p.l2norm, q_copy);
  if (warp < plan.heads_a_block) {
    auto* out = reinterpret_cast<float*>(plan.chunk(slot, first_head + warp) + 2 * kMatrixBytes);
    make_gates(p, gates[warp], out, gate_bits, from, to);
  }
  __syncthreads();
  float kk[8][4], qk[8][4];
  multiply<T, K>(kk, k_tile, k_tile, warp, lane);
  multiply<T, K>(qk, q_tile, k_tile, warp, lane);

  for (int r = 0; r < plan.heads_a_block; r++) {
    char* out = plan.chunk(slot, first_head + r);
    auto* coupling = reinterpret_cast<uint2*>(out);
    auto* scores = reinterpret_cast<uint2*>(out + kMatrixBytes);
    __syncthreads();  // the tiles, or the last head's L and inverse, are done with

    // L to shared memory, scores to the workspace.
    uint32_t words[2];
    each_decay(gates[r], warp, lane, [&](int j, int half, int i, int row, int column, float2 decay) {
      *reinterpret_cast<float2*>(&lower[row * kLowerStride + column]) = lower_pair(kk, gates[r], j, half, i, row, column, decay);
      put_scores<T>(scores, qk, p.scale, words, j, half, i, row, column, decay, warp, lane);
    });
    __syncwarp();  // a diagonal block is its own warp's work

    float* inverse = inverses + warp * kChunk * kInverseStride;  // column `warp` of blocks
    invert_block(inverse + 16 * warp * kInverseStride, lower + 16 * warp * kLowerStride + 16 * warp, lane);
    __syncthreads();  // L and all diagonal blocks are there

    fill_column<T>(coupling, inverses, lower, warp, lane);
  }
}

template <class T, int K>
void launch(const PrefillParams& p, const PrefillPlan& plan, cudaStream_t stream) {
  static_assert(Shared<K>::bytes <= 48 << 10, "more would need an attribute");
  const dim3 grid(unsigned(plan.slots), unsigned(plan.heads / plan.heads_a_block));
  GDN_LAUNCH((chunks<T, K>), grid, 32 * kWarps, Shared<K>::bytes, stream, p, plan);
  check(cudaGetLastError(), "prefill, first stage");
}

template <class T>
void launch(const PrefillParams& p, const PrefillPlan& plan, cudaStream_t stream) {
  p.head_size_k == 128 ? launch<T, 128>(p, plan, stream) : launch<T, 64>(p, plan, stream);
}

}  // namespace

void launch_chunks(const PrefillParams& p, const PrefillPlan& plan, cudaStream_t stream) {
  p.dtype == DType::bf16 ? launch<__nv_bfloat16>(p, plan, stream) : launch<__half>(p, plan, stream);
}

}  // namespace gdn
