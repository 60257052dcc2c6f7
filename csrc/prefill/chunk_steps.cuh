// What a chunk of 64 tokens needs that does not depend on the state, step by step, by warps on tiles in shared memory: for
// chunks.cu, which says what is computed, and for fused.cu.
#pragma once
#include "sequence.cuh"

namespace gdn {

constexpr int kLowerStride = kChunk + 4;  // floats; rows shift by 4 banks, so fragment reads do not collide
constexpr int kInverseStride = 16 + 4;
constexpr int kLowerBytes = kChunk * kLowerStride * 4;
constexpr int kInverseBytes = 4 * kChunk * kInverseStride * 4;

// Of a tile of q or k: 8 rows fall into different banks.
template <int K>
constexpr int kTileRow = 2 * K + 16;

struct Gates {
  float sum[kChunk];   // G
  float beta[kChunk];
  int zeros[kChunk];
};

// One head's gates, by one warp: lane l takes tokens l and l + 32.
struct GateBits {
  Bits g[2], beta[2], A_log, dt_bias;
};

__device__ __forceinline__ void load_raw_gate(GateBits& x, const PrefillParams& p, int h) {
  x.A_log = p.gate == Gate::raw ? load_bits(p.A_log, h, p.A_log_dtype) : Bits{};
  x.dt_bias = p.gate == Gate::raw ? load_bits(p.dt_bias, h, p.dt_bias_dtype) : Bits{};
}

__device__ __forceinline__ void load_gates(GateBits& x, const PrefillParams& p, int64_t token, int from, int to, int h) {
  load_raw_gate(x, p, h);
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
  }
  const int zeros_last = add_up_gates(sum, zeros, lane);
  const float last = __shfl_sync(0xffffffffu, sum[1], 31);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    gates.sum[t] = sum[i], gates.beta[t] = beta[i], gates.zeros[t] = zeros[i];
    out[t] = zeros[i] == 0 ? exp2f(sum[i]) : 0.f;
    out[kChunk + t] = beta[i];
    out[2 * kChunk + t] = zeros[i] == zeros_last ? exp2f(last - sum[i]) : 0.f;
  }
}

// Eight elements of a row of q or k that LANES lanes side by side share, normalised.
template <class T, int LANES>
__device__ __forceinline__ void normalise(uint4& x) {
  uint32_t* words[4] = {&x.x, &x.y, &x.z, &x.w};
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 pair = Pair<T>::unpack(*words[j]);
    sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum));
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const float factor = norm_factor(sum);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 pair = Pair<T>::unpack(*words[j]);
    *words[j] = Pair<T>::pack(pair.x * factor, pair.y * factor);
  }
}

// 16 rows of left times the rows of right up to the same block, transposed: d[n] is columns 8 n to 8 n + 7.
template <class T, int K>
__device__ __forceinline__ void multiply(float (&d)[8][4], const uint8_t* left, const uint8_t* right, int warp, int lane) {
  constexpr int kRow = kTileRow<K>;
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

// Of 16 rows of a product of keys: for each tile of columns 16 j + 8 half, and this lane's row of those with number i of two, its columns
// `column` and `column` + 1 and the decays from these tokens to the row's. Above the diagonal a decay means nothing and may be infinite.
template <class F>
__device__ __forceinline__ void each_decay(const Gates& gate, int warp, int lane, F&& f) {
  const int g = lane / 4, q = lane % 4, i0 = 16 * warp + g;
  const float sum[2] = {gate.sum[i0], gate.sum[i0 + 8]};
  const int zeros[2] = {gate.zeros[i0], gate.zeros[i0 + 8]};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (j > warp) break;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = 16 * j + 8 * half + 2 * q;
      const float2 sums = *reinterpret_cast<const float2*>(&gate.sum[column]);
      const int2 zeros_j = *reinterpret_cast<const int2*>(&gate.zeros[column]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 decay = make_float2(zeros[i] == zeros_j.x ? exp2f(sum[i] - sums.x) : 0.f, zeros[i] == zeros_j.y ? exp2f(sum[i] - sums.y) : 0.f);
        f(j, half, i, i0 + 8 * i, column, decay);
      }
    }
  }
}

// Scores of two columns, in fragment order, to where the recurrence finds them; `words` keeps those of half 0.
template <class T>
__device__ __forceinline__ void put_scores(uint2* scores, const float (&qk)[8][4], float scale, uint32_t (&words)[2], int j, int half, int i, int row,
                                           int column, float2 decay, int warp, int lane) {
  const float(&x)[4] = qk[2 * j + half];
  const uint32_t word = Pair<T>::pack(column <= row ? scale * x[2 * i] * decay.x : 0.f, column + 1 <= row ? scale * x[2 * i + 1] * decay.y : 0.f);
  if (half == 0)
    words[i] = word;
  else
    scores[block_index(2 * warp + i, j) * 32 + lane] = make_uint2(words[i], word);
}

// And of L.
__device__ __forceinline__ float2 lower_pair(const float (&kk)[8][4], const Gates& gate, int j, int half, int i, int row, int column, float2 decay) {
  const float(&x)[4] = kk[2 * j + half];
  const float beta = gate.beta[row];
  return make_float2(column < row ? beta * x[2 * i] * decay.x : 0.f, column + 1 < row ? beta * x[2 * i + 1] * decay.y : 0.f);
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

// Column `warp` of the coupling's 16x16 blocks. L and all diagonal blocks of the inverse are there.
template <class T>
__device__ __forceinline__ void fill_column(uint2* coupling, float* inverses, const float* lower, int warp, int lane) {
  const int g = lane / 4, q = lane % 4;
  float* inverse = inverses + warp * kChunk * kInverseStride;
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
    coupling[block_index(2 * warp + i, warp) * 32 + lane] = make_uint2(words[0], words[1]);
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
      coupling[block_index(2 * i + e, warp) * 32 + lane] =
          make_uint2(Pair<T>::pack(-block[0][2 * e], -block[0][2 * e + 1]), Pair<T>::pack(-block[1][2 * e], -block[1][2 * e + 1]));
  }
}

}  // namespace gdn
