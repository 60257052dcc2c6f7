// Prefill on sm_90a, first kernel: what a chunk of 64 tokens needs that does not depend on the state, all chunks and heads at
// once. The mathematics and the care for alpha = 0 are those of chunks.cu; what differs is what is left behind: normalised
// tiles of q and k and the triangular matrices, as the copy engine and wgmma want them (sm90_workspace.cuh).
//
// One CTA of four warps makes a chunk for one head of q and k and several state heads that share them. `M` is the type of
// the operands that are left: the inputs' own, or fp16, whose mantissa is three bits longer.
#include "sequence.cuh"
#include "sm90_workspace.cuh"

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadsAtMost = 4;
constexpr int kLowerStride = kChunk + 4;  // floats; rows shift by 4 banks, so fragment reads do not collide
constexpr int kInverseStride = 16 + 4;
constexpr int kLowerBytes = kChunk * kLowerStride * 4;
constexpr int kInverseBytes = kWarps * kChunk * kInverseStride * 4;

// Shared memory: k's tile and then L; q's tile and then the inverse; the gates.
constexpr int kSecond = kTileBytes > kLowerBytes ? kTileBytes : kLowerBytes;
constexpr int kGates = kSecond + (kTileBytes > kInverseBytes ? kTileBytes : kInverseBytes);

struct Gates {
  float sum[kChunk];
  float beta[kChunk];
  int zeros[kChunk];
};
struct Rows {
  float k_scale[kChunk], q_scale[kChunk];  // powers of two: the tiles' rows times these are k and q
  float squares[kChunk];                   // |k|^2
};
constexpr int kBytes = kGates + kHeadsAtMost * int(sizeof(Gates)) + int(sizeof(Rows));
static_assert(kBytes <= 48 << 10, "more would need an attribute");

__device__ __forceinline__ int tile_at(int row, int piece) { return piece / 8 * 8192 + row * 128 + ((piece ^ row) & 7) * 16; }

// One head's gates, by one warp: lane l takes tokens l and l + 32.
__device__ __forceinline__ void make_gates(const PrefillParams& p, Gates& gates, int64_t token, int from, int to, int h) {
  const int lane = threadIdx.x % 32;
  const float A_log = p.gate == Gate::raw ? load_float(p.A_log, h, p.A_log_dtype) : 0.f;
  const float dt_bias = p.gate == Gate::raw ? load_float(p.dt_bias, h, p.dt_bias_dtype) : 0.f;
  float sum[2], beta[2];
  int zeros[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    sum[i] = 0.f, beta[i] = 0.f, zeros[i] = 0;
    if (t >= from && t < to) {
      if (p.gate != Gate::none) {
        const float g = load_float(p.g, (token + t) * p.g_stride.token + h * p.g_stride.head, p.g_dtype);
        sum[i] = p.gate == Gate::linear ? log2f(g) : kLog2e * (p.gate == Gate::log ? g : raw_gate(g, A_log, dt_bias));
        if (sum[i] < -300.f) sum[i] = 0.f, zeros[i] = 1;
      }
      beta[i] = 1.f;
      if (p.beta != nullptr) {
        beta[i] = load_float(p.beta, (token + t) * p.beta_stride.token + h * p.beta_stride.head, p.beta_dtype);
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
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    gates.sum[t] = sum[i], gates.beta[t] = beta[i], gates.zeros[t] = zeros[i];
  }
}

// What the recurrence wants of them, with the scales of the tiles' rows: one thread a token.
__device__ __forceinline__ void write_gates(float* out, const Gates& gates, const Rows& rows, float scale, int t) {
  const float last = gates.sum[kChunk - 1], gamma = gates.zeros[t] == 0 ? exp2f(gates.sum[t]) : 0.f;
  out[kBeta * kChunk + t] = gates.beta[t];
  out[kBetaGamma * kChunk + t] = gates.beta[t] * gamma * rows.k_scale[t];
  out[kScaleGamma * kChunk + t] = scale * gamma * rows.q_scale[t];
  out[kTail * kChunk + t] = gates.zeros[t] == gates.zeros[kChunk - 1] ? exp2f(last - gates.sum[t]) * rows.k_scale[t] : 0.f;
  if (t == kChunk - 1) out[kEnd * kChunk] = gamma;
}

// A tile of q or k into shared memory, rows that are no tokens as zeros, normalised if wanted; and out, the same image.
// fp16 for bf16 has to take any row: what was not normalised is divided by a power of two, which goes to `scales`.
template <class T, class M>
__device__ __forceinline__ void load_tile(uint8_t* tile, const void* data, int64_t stride, bool aligned, int64_t token, int from,
                                          int to, bool l2norm, char* copy, float* scales) {
  const int row0 = threadIdx.x / 16, piece = threadIdx.x % 16;
  uint4 x[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = row0 + 8 * i;
    x[i] = make_uint4(0, 0, 0, 0);
    if (row >= from && row < to) {
      const uint16_t* source = static_cast<const uint16_t*>(data) + (token + row) * stride + 8 * piece;
      if (aligned) {
        x[i] = *reinterpret_cast<const uint4*>(source);
      } else {
        const auto pair = [&](int j) { return uint32_t(source[j]) | uint32_t(source[j + 1]) << 16; };
        x[i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = row0 + 8 * i;
    uint32_t* words[4] = {&x[i].x, &x[i].y, &x[i].z, &x[i].w};
    if (l2norm) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = Pair<T>::unpack(*words[j]);
        sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
      }
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      const float factor = 1.f / sqrtf(sum + 1e-6f);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = Pair<T>::unpack(*words[j]);
        *words[j] = Pair<T>::pack(pair.x * factor, pair.y * factor);
      }
    }
    float scale = 1.f;
    if constexpr (!std::is_same_v<T, M>) {
      float inverse = 1.f;
      if (!l2norm) {
        float largest = 0.f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 pair = Pair<T>::unpack(*words[j]);
          largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        // 2^e of the largest value, where it and its inverse are normal numbers: zeros, infinities and NaN stay as they are.
        const uint32_t exponent = __float_as_uint(largest) >> 23;
        if (exponent > 1 && exponent < 253) scale = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = Pair<T>::unpack(*words[j]);
        *words[j] = Pair<M>::pack(pair.x * inverse, pair.y * inverse);
      }
    }
    if (piece == 0) scales[row] = scale;
    *reinterpret_cast<uint4*>(tile + tile_at(row, piece)) = x[i];
    if (copy != nullptr) *reinterpret_cast<uint4*>(copy + tile_at(row, piece)) = x[i];
  }
}

// 16 rows of left times the rows of right up to the same block, transposed: d[n] is columns 8 n to 8 n + 7.
template <class M>
__device__ __forceinline__ void multiply(float (&d)[8][4], const uint8_t* left, const uint8_t* right, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) d[n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < kHead / 16; k++) {
    uint32_t a[4];
    load_tiles(a, left + tile_at(16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j > warp) break;
      uint32_t b[4];
      load_tiles(b, right + tile_at(16 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
      mma<M>(d[2 * j], a, b[0], b[1]);
      mma<M>(d[2 * j + 1], a, b[2], b[3]);
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

// Tile of targets 8 n.. and sources 16 k + 8 half.. of a triangular matrix: this lane's word of it.
__device__ __forceinline__ uint32_t* word(char* matrix, int n, int k, int half, int lane) {
  return reinterpret_cast<uint32_t*>(matrix + strip_at(k) + (n - 2 * k) * 256 + half * 128) + lane;
}

// Grid: x = slot, y = share of the pass's heads.
template <class T, class M>
__global__ void __launch_bounds__(32 * kWarps, 3) chunks(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan) {
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

  uint8_t *k_tile = shared, *q_tile = shared + kSecond;
  float *lower = reinterpret_cast<float*>(shared), *inverses = reinterpret_cast<float*>(shared + kSecond);
  auto* gates = reinterpret_cast<Gates*>(shared + kGates);
  auto& rows = *reinterpret_cast<Rows*>(gates + kHeadsAtMost);

  if (warp < plan.heads_a_block) make_gates(p, gates[warp], token, from, to, first_head + warp);
  const int heads_q = p.heads / p.q_group, heads_k = p.heads / p.k_group;
  // Of the CTAs that share a head of q or k, the one with its first state head leaves the tile.
  char* k_copy = first_head % p.k_group == 0 ? plan.k_tiles + (slot * heads_k + kh) * kTileBytes : nullptr;
  char* q_copy = first_head % p.q_group == 0 ? plan.q_tiles + (slot * heads_q + qh) * kTileBytes : nullptr;
  load_tile<T, M>(k_tile, static_cast<const uint16_t*>(p.k) + kh * p.k_stride.head, p.k_stride.token, p.k_aligned, token, from, to,
                  p.l2norm, k_copy, rows.k_scale);
  load_tile<T, M>(q_tile, static_cast<const uint16_t*>(p.q) + qh * p.q_stride.head, p.q_stride.token, p.q_aligned, token, from, to,
                  p.l2norm, q_copy, rows.q_scale);
  __syncthreads();
  float kk[8][4], qk[8][4];
  multiply<M>(kk, k_tile, k_tile, warp, lane);
  multiply<M>(qk, q_tile, k_tile, warp, lane);
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 16 * warp + g + i / 2 * 8, column = 8 * n + 2 * q + i % 2;
      if (n / 2 > warp) continue;
      if constexpr (!std::is_same_v<T, M>) {
        kk[n][i] *= rows.k_scale[row] * rows.k_scale[column];
        qk[n][i] *= rows.q_scale[row] * rows.k_scale[column];
      }
      if (column == row) rows.squares[row] = kk[n][i];
    }
  for (int i = threadIdx.x; i < plan.heads_a_block * kChunk; i += blockDim.x) {
    const int r = i / kChunk;
    write_gates(reinterpret_cast<float*>(plan.record(slot, first_head + r) + kGatesAt), gates[r], rows, p.scale, i % kChunk);
  }

  for (int r = 0; r < plan.heads_a_block; r++) {
    const Gates& gate = gates[r];
    char* record = plan.record(slot, first_head + r);
    __syncthreads();  // the tiles, or the last head's L and inverse, are done with

    // L to shared memory, scores to the workspace.
    const int i0 = 16 * warp + g;
    const float sum[2] = {gate.sum[i0], gate.sum[i0 + 8]}, beta[2] = {gate.beta[i0], gate.beta[i0 + 8]};
    const int zeros[2] = {gate.zeros[i0], gate.zeros[i0 + 8]};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j > warp) break;
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
          *word(record + kScoresAt, 2 * warp + i, j, half, lane) = Pair<M>::pack(s[0], s[1]);
        }
      }
    }
    // A token's transition alpha (I - beta k k^T) has the norm alpha max(1, |1 - beta |k|^2|).
    if (warp == 0 && plan.path.segment > 0) {
      float bound = 0.f;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int t = lane + 32 * i;
        bound += log2f(fmaxf(1.f, fabsf(1.f - gate.beta[t] * rows.squares[t])));
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) bound += __shfl_xor_sync(0xffffffffu, bound, offset);
      if (lane == 0)
        reinterpret_cast<float*>(record + kGatesAt)[kEnd * kChunk + 1] = gate.sum[kChunk - 1] - 300.f * gate.zeros[kChunk - 1] + bound;
    }
    __syncwarp();  // a diagonal block is its own warp's work

    float* inverse = inverses + warp * kChunk * kInverseStride;  // column `warp` of blocks
    invert_block(inverse + 16 * warp * kInverseStride, lower + 16 * warp * kLowerStride + 16 * warp, lane);
    __syncthreads();  // L and all diagonal blocks are there

    // The diagonal block's own part of the coupling: without the identity.
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = g + 8 * i;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int column = 8 * half + 2 * q;
        const float2 x = *reinterpret_cast<const float2*>(&inverse[(16 * warp + row) * kInverseStride + column]);
        *word(record, 2 * warp + i, warp, half, lane) = Pair<M>::pack(column < row ? x.x : 0.f, column + 1 < row ? x.y : 0.f);
      }
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
#pragma unroll
        for (int e = 0; e < 2; e++) *word(record, 2 * i + e, warp, n, lane) = Pair<M>::pack(-block[n][2 * e], -block[n][2 * e + 1]);
      }
      __syncwarp();
    }
  }
}

template <class T, class M>
void launch(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  const dim3 grid(unsigned(plan.slots), unsigned(plan.heads / plan.heads_a_block));
  GDN_LAUNCH((chunks<T, M>), grid, 32 * kWarps, kBytes, stream, p, plan);
  check(cudaGetLastError(), "prefill on sm_90a, chunks");
}

}  // namespace

void launch_chunks(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  if (p.dtype == DType::f16) return launch<__half, __half>(p, plan, stream);
  plan.path.half ? launch<__nv_bfloat16, __half>(p, plan, stream) : launch<__nv_bfloat16, __nv_bfloat16>(p, plan, stream);
}

}  // namespace sm90
}  // namespace gdn
#endif
