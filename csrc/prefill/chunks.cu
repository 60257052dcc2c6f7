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
#include "sequence.cuh"

namespace gdn {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadsAtMost = 4;
constexpr int kLowerStride = kChunk + 4;  // floats; rows shift by 4 banks, so fragment reads do not collide
constexpr int kInverseStride = 16 + 4;

template <int K>
struct Shared {
  static constexpr int row_bytes = 2 * K + 16;  // 8 rows of a tile fall into different banks
  static constexpr int tile_bytes = kChunk * row_bytes;
  static constexpr int lower_bytes = kChunk * kLowerStride * 4;
  static constexpr int inverse_bytes = kWarps * kChunk * kInverseStride * 4;
  // K's tile and then L; Q's tile and then the inverse; the gates.
  static constexpr int second = tile_bytes > lower_bytes ? tile_bytes : lower_bytes;
  static constexpr int gates = second + (tile_bytes > inverse_bytes ? tile_bytes : inverse_bytes);
  static constexpr int bytes = gates + kHeadsAtMost * kChunk * 3 * 4;
};

struct Gates {
  float sum[kChunk];   // G
  float beta[kChunk];
  int zeros[kChunk];
};

// One head's gates, by one warp: lane l takes tokens l and l + 32.
struct GateBits {
  Bits g[2], beta[2], A_log, dt_bias;
};

__device__ __forceinline__ void load_gates(GateBits& x, const PrefillParams& p, int64_t token, int from, int to, int h) {
  x.A_log = p.gate == Gate::raw ? load_bits(p.A_log, h, p.A_log_dtype) : Bits{};
  x.dt_bias = p.gate == Gate::raw ? load_bits(p.dt_bias, h, p.dt_bias_dtype) : Bits{};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = threadIdx.x % 32 + 32 * i;
    const bool valid = t >= from && t < to;
    x.g[i] = valid && p.gate != Gate::none ? load_bits(p.g, (token + t) * p.g_stride.token + h * p.g_stride.head, p.g_dtype) : Bits{};
    x.beta[i] = valid && p.beta != nullptr
                    ? load_bits(p.beta, (token + t) * p.beta_stride.token + h * p.beta_stride.head, p.beta_dtype)
                    : Bits{};
  }
}

__device__ __forceinline__ void make_gates(const PrefillParams& p, Gates& gates, float* out, const GateBits& x, int from, int to) {
  const int lane = threadIdx.x % 32;
  float sum[2], beta[2];
  int zeros[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    sum[i] = 0.f, beta[i] = 0.f, zeros[i] = 0;
    if (t >= from && t < to) {
      if (p.gate != Gate::none) {
        const float g = to_float(x.g[i], p.g_dtype);
        sum[i] = p.gate == Gate::linear ? log2f(g)
                 : kLog2e * (p.gate == Gate::log ? g : raw_gate(g, to_float(x.A_log, p.A_log_dtype), to_float(x.dt_bias, p.dt_bias_dtype)));
        if (sum[i] < -300.f) sum[i] = 0.f, zeros[i] = 1;
      }
      beta[i] = 1.f;
      if (p.beta != nullptr) {
        beta[i] = to_float(x.beta[i], p.beta_dtype);
        if (p.beta_is_logit) beta[i] = round_to(sigmoid(beta[i]), p.beta_dtype);
      }
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum[i], offset);
      const int zeros_before = __shfl_up_sync(0xffffffffu, zeros[i], offset);
      if (lane >= offset) sum[i] += before, zeros[i] += zeros_before;
    }
  }
  sum[1] += __shfl_sync(0xffffffffu, sum[0], 31);
  zeros[1] += __shfl_sync(0xffffffffu, zeros[0], 31);
  const float last = __shfl_sync(0xffffffffu, sum[1], 31);
  const int zeros_last = __shfl_sync(0xffffffffu, zeros[1], 31);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    gates.sum[t] = sum[i], gates.beta[t] = beta[i], gates.zeros[t] = zeros[i];
    out[t] = zeros[i] == 0 ? exp2f(sum[i]) : 0.f;
    out[kChunk + t] = beta[i];
    out[2 * kChunk + t] = zeros[i] == zeros_last ? exp2f(last - sum[i]) : 0.f;
  }
}

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
    if (l2norm) {
      uint32_t* words[4] = {&x[i].x, &x[i].y, &x[i].z, &x[i].w};
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = Pair<T>::unpack(*words[j]);
        sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      const float factor = norm_factor(sum);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = Pair<T>::unpack(*words[j]);
        *words[j] = Pair<T>::pack(pair.x * factor, pair.y * factor);
      }
    }
    *reinterpret_cast<uint4*>(tile + row * Shared<K>::row_bytes + column * 2) = x[i];
    if (copy != nullptr) *reinterpret_cast<uint4*>(copy + (row * K + column) * 2) = x[i];
  }
}

// 16 rows of left times the rows of right up to the same block, transposed: d[n] is columns 8 n to 8 n + 7.
template <class T, int K>
__device__ __forceinline__ void multiply(float (&d)[8][4], const uint8_t* left, const uint8_t* right, int warp, int lane) {
  constexpr int kRow = Shared<K>::row_bytes;
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < K / 16; k++) {
    uint32_t a[4];
    load_tiles(a, left + (16 * warp + lane % 16) * kRow + (16 * k + lane / 16 * 8) * 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j > warp) break;
      uint32_t b[4];
      load_tiles(b, right + (16 * j + lane / 16 * 8 + lane % 8) * kRow + (16 * k + lane / 8 % 2 * 8) * 2);
      mma<T>(d[2 * j], a, b[0], b[1]);
      mma<T>(d[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Column `lane % 16` of the inverse of I + L's 16x16 block at `lower`, by substitution.
__device__ __forceinline__ void invert_block(float* inverse, const float* lower, int lane) {
  float x[16];
  const int column = lane % 16;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + i * kLowerStride + m);
      sum[0] = fmaf(l.x, x[m], sum[0]);
      if (m + 1 < i) sum[1] = fmaf(l.y, x[m + 1], sum[1]);
      if (m + 2 < i) sum[0] = fmaf(l.z, x[m + 2], sum[0]);
      if (m + 3 < i) sum[1] = fmaf(l.w, x[m + 3], sum[1]);
    }
    // Above the diagonal zero by selection: there the sum is of zeros, or of zeros times what may be infinite.
    x[i] = column == i ? 1.f : column < i ? -(sum[0] + sum[1]) : 0.f;
  }
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; i++) inverse[i * kInverseStride + column] = x[i];
  }
}

// d += [16, 8] of left times [8, 16] of right, all in shared memory.
__device__ __forceinline__ void multiply_tf32(float (&d)[2][4], const float* left, int left_stride, const float* right, int lane) {
  const int g = lane / 4, p = lane % 4;
  const uint32_t a[4] = {to_tf32(left[g * left_stride + p]), to_tf32(left[(g + 8) * left_stride + p]),
                         to_tf32(left[g * left_stride + p + 4]), to_tf32(left[(g + 8) * left_stride + p + 4])};
#pragma unroll
  for (int n = 0; n < 2; n++)
    mma_tf32(d[n], a, to_tf32(right[p * kInverseStride + 8 * n + g]), to_tf32(right[(p + 4) * kInverseStride + 8 * n + g]));
}

// Grid: x = slot, y = share of the pass's heads.
template <class T, int K>
__global__ void __launch_bounds__(32 * kWarps) chunks(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillPlan plan) {
  using S = Shared<K>;
  GDN_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
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
    const Gates& gate = gates[r];
    char* out = plan.chunk(slot, first_head + r);
    auto* coupling = reinterpret_cast<uint2*>(out) + lane;
    auto* scores = reinterpret_cast<uint2*>(out + kMatrixBytes) + lane;
    __syncthreads();  // the tiles, or the last head's L and inverse, are done with

    // L to shared memory, scores to the workspace.
    const int i0 = 16 * warp + g;
    const float sum[2] = {gate.sum[i0], gate.sum[i0 + 8]}, beta[2] = {gate.beta[i0], gate.beta[i0 + 8]};
    const int zeros[2] = {gate.zeros[i0], gate.zeros[i0 + 8]};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j > warp) break;
      uint32_t words[2][2];  // of rows i0 and i0 + 8, of columns 16 j and 16 j + 8
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = 2 * j + half, column = 8 * n + 2 * q;
        const float2 sums = *reinterpret_cast<const float2*>(&gate.sum[column]);
        const int2 zeros_j = *reinterpret_cast<const int2*>(&gate.zeros[column]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = i0 + 8 * i;
          const float decay[2] = {zeros[i] == zeros_j.x ? exp2f(sum[i] - sums.x) : 0.f,
                                  zeros[i] == zeros_j.y ? exp2f(sum[i] - sums.y) : 0.f};
          float l[2], s[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {  // above the diagonal a decay means nothing and may be infinite: selected away
            l[e] = column + e < row ? beta[i] * kk[n][2 * i + e] * decay[e] : 0.f;
            s[e] = column + e <= row ? p.scale * qk[n][2 * i + e] * decay[e] : 0.f;
          }
          *reinterpret_cast<float2*>(&lower[row * kLowerStride + column]) = make_float2(l[0], l[1]);
          words[i][half] = Pair<T>::pack(s[0], s[1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) scores[block_index(2 * warp + i, j) * 32] = make_uint2(words[i][0], words[i][1]);
    }
    __syncwarp();  // a diagonal block is its own warp's work

    float* inverse = inverses + warp * kChunk * kInverseStride;  // column `warp` of blocks
    invert_block(inverse + 16 * warp * kInverseStride, lower + 16 * warp * kLowerStride + 16 * warp, lane);
    __syncthreads();  // L and all diagonal blocks are there

    // The diagonal block's own part of the coupling: without the identity.
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = g + 8 * i;
      uint32_t words[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int column = 8 * half + 2 * q;
        const float2 x = *reinterpret_cast<const float2*>(&inverse[(16 * warp + row) * kInverseStride + column]);
        words[half] = Pair<T>::pack(column < row ? x.x : 0.f, column + 1 < row ? x.y : 0.f);
      }
      coupling[block_index(2 * warp + i, warp) * 32] = make_uint2(words[0], words[1]);
    }
    for (int i = warp + 1; i < 4; i++) {
      float sum[2][4] = {}, block[2][4] = {};
      for (int m = warp; m < i; m++)
#pragma unroll
        for (int k = 0; k < 2; k++)
          multiply_tf32(sum, lower + 16 * i * kLowerStride + 16 * m + 8 * k, kLowerStride,
                        inverse + (16 * m + 8 * k) * kInverseStride, lane);
      float* place = inverse + 16 * i * kInverseStride;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        *reinterpret_cast<float2*>(&place[g * kInverseStride + 8 * n + 2 * q]) = make_float2(sum[n][0], sum[n][1]);
        *reinterpret_cast<float2*>(&place[(g + 8) * kInverseStride + 8 * n + 2 * q]) = make_float2(sum[n][2], sum[n][3]);
      }
      __syncwarp();
      const float* diagonal = inverses + i * kChunk * kInverseStride + 16 * i * kInverseStride;
#pragma unroll
      for (int k = 0; k < 2; k++) multiply_tf32(block, diagonal + 8 * k, kInverseStride, place + 8 * k * kInverseStride, lane);
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 2; n++) {
        *reinterpret_cast<float2*>(&place[g * kInverseStride + 8 * n + 2 * q]) = make_float2(-block[n][0], -block[n][1]);
        *reinterpret_cast<float2*>(&place[(g + 8) * kInverseStride + 8 * n + 2 * q]) = make_float2(-block[n][2], -block[n][3]);
      }
      __syncwarp();
#pragma unroll
      for (int e = 0; e < 2; e++)
        coupling[block_index(2 * i + e, warp) * 32] =
            make_uint2(Pair<T>::pack(-block[0][2 * e], -block[0][2 * e + 1]), Pair<T>::pack(-block[1][2 * e], -block[1][2 * e + 1]));
    }
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
