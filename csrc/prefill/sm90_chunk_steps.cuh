// Pieces of what the kernels for sm_90a do with a chunk before its state is there (sm90_chunks.cu, sm90_pairs.cu): gates, rows that are
// normalised, 16x16 blocks of the triangular matrices. A warp has 16 of a chunk's rows.
#pragma once
#include "sequence.cuh"
#include "sm90_workspace.cuh"

#if GDN_SM90
#include "../common/sm90_primitives.cuh"

namespace gdn {
namespace sm90 {

constexpr int kStride = 16 + 4;           // floats, of a diagonal block's rows: fragments and columns fall into different banks
constexpr int kPitch = 16 * kStride + 4;  // floats, from a diagonal block to the next: the same, for the four that are read at once

struct Gates {
  float sum[kChunk];     // of log2(alpha), from the chunk's start to here
  float beta[kChunk];
  float before[kChunk];  // decay from the end of the 16 tokens before to here
  float target[kChunk];  // the same, times beta unless it is at the sources
  float after[kChunk];   // decay from here to the end of these 16, times beta if it is
  int zeros[kChunk];
};

__device__ __forceinline__ int tile_at(int row, int piece) { return piece / 8 * 8192 + row * 128 + ((piece ^ row) & 7) * 16; }

// --- gates -------------------------------------------------------------------------------------------------------------

// One head's gates, by one warp: lane l takes tokens l and l + 32.
struct GateBits {
  uint32_t g[2], beta[2], g_shift, beta_shift;  // as load_bits has them; 32 tokens are a whole number of words
  Bits A_log, dt_bias;
};

__device__ __forceinline__ void load_raw_gate(GateBits& x, const PrefillParams& p, int h) {
  x.A_log = x.dt_bias = Bits{};
  if (p.gate == Gate::raw) {
    x.A_log = load_bits(p.A_log, h, p.A_log_dtype);
    x.dt_bias = load_bits(p.dt_bias, h, p.dt_bias_dtype);
  }
}

__device__ __forceinline__ void load_gates(GateBits& x, const PrefillParams& p, int64_t token, int from, int to, int h) {
  const int lane = threadIdx.x % 32;
  const auto load = [&](uint32_t(&words)[2], const void* data, const Strides3& stride, DType dtype, bool given) {
    const int size = dtype == DType::f32 ? 4 : 2;
    const char* address = static_cast<const char*>(data) + ((token + lane) * stride.token + h * stride.head) * size;
    const uint32_t odd = uint32_t(reinterpret_cast<uintptr_t>(address)) & 2;
    address -= odd;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = lane + 32 * i;
      words[i] = given && t >= from && t < to ? *reinterpret_cast<const uint32_t*>(address) : 0;
      address += 32 * size * stride.token;
    }
    return odd * 8;
  };
  x.g_shift = load(x.g, p.g, p.g_stride, p.g_dtype, p.gate != Gate::none);
  x.beta_shift = load(x.beta, p.beta, p.beta_stride, p.beta_dtype, p.beta != nullptr);
  load_raw_gate(x, p, h);
}

template <class M>
__device__ __forceinline__ void make_gates(const PrefillParams& p, Gates& gates, const GateBits& x, int from, int to) {
  const int lane = threadIdx.x % 32;
  float sum[2], beta[2];
  int zeros[2];
  const auto both = [](auto&& f) { f(0), f(1); };
  both([&](int i) { sum[i] = to_float({x.g[i], x.g_shift}, p.g_dtype); });
  if (p.gate == Gate::linear) {
    both([&](int i) { sum[i] = log2f(sum[i]); });
  } else if (p.gate == Gate::log) {
    both([&](int i) { sum[i] *= kLog2e; });
  } else if (p.gate == Gate::raw) {
    const float A_log = to_float(x.A_log, p.A_log_dtype), dt_bias = to_float(x.dt_bias, p.dt_bias_dtype);
    both([&](int i) { sum[i] = kLog2e * raw_gate(sum[i], A_log, dt_bias); });
  }
  both([&](int i) { beta[i] = p.beta != nullptr ? to_float({x.beta[i], x.beta_shift}, p.beta_dtype) : 1.f; });
  if (p.beta_is_logit && p.beta != nullptr) both([&](int i) { beta[i] = round_to(sigmoid(beta[i]), p.beta_dtype); });
  both([&](int i) {
    const int t = lane + 32 * i;
    const bool valid = t >= from && t < to, zero = sum[i] < -300.f;
    zeros[i] = valid && zero;
    sum[i] = valid && !zero ? sum[i] : 0.f;
    beta[i] = valid ? beta[i] : 0.f;
  });
  add_up_gates(sum, zeros, lane);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    gates.sum[t] = sum[i], gates.beta[t] = beta[i], gates.zeros[t] = zeros[i];
  }
  __syncwarp();
  // All loads, then all that hangs on them.
  float from_start[2], to_end[2];
  bool start_zeros[2], end_zeros[2];
  both([&](int i) {
    const int t = lane + 32 * i, end = t | 15, start = t < 16 ? 0 : t / 16 * 16 - 1;
    from_start[i] = sum[i] - gates.sum[start], start_zeros[i] = gates.zeros[start] != zeros[i];
    to_end[i] = gates.sum[end] - sum[i], end_zeros[i] = gates.zeros[end] != zeros[i];
  });
  both([&](int i) {
    from_start[i] = exp2_approximate(from_start[i]), to_end[i] = exp2_approximate(to_end[i]);
    from_start[i] = start_zeros[i] ? 0.f : from_start[i], to_end[i] = end_zeros[i] ? 0.f : to_end[i];
  });
  both([&](int i) {
    const int t = lane + 32 * i;
    const float to_target = kBetaAtSources<M> ? 1.f : beta[i], to_source = kBetaAtSources<M> ? beta[i] : 1.f;
    gates.before[t] = from_start[i], gates.target[t] = from_start[i] * to_target, gates.after[t] = to_end[i] * to_source;
  });
  __syncwarp();
}

// --- tiles -------------------------------------------------------------------------------------------------------------

// A warp has 16 rows of a tile, four lanes a row: this lane row tile_row() and the eighth behind it, pieces lane % 4 + 4 j. Any
// eight lanes in a row write to all banks of shared memory.
__device__ __forceinline__ int tile_row(int warp) {
  const int lane = threadIdx.x % 32;
  return warp * 16 + lane / 8 + (lane & 4);
}

// Where this lane's piece j of row tile_row() + 8 i lies, from that of piece 0 of row 0.
struct Place {
  int even, odd;

  __device__ __forceinline__ explicit Place(int warp) : even(tile_at(tile_row(warp), threadIdx.x % 4)), odd(even ^ 64) {}
  __device__ __forceinline__ int operator()(int i, int j) const { return (j % 2 == 0 ? even : odd) + (j / 2 * 8192 + i * 1024); }
};

template <class F>
__device__ __forceinline__ void each_word(uint4& x, F&& f) {
  f(x.x), f(x.y), f(x.z), f(x.w);
}

// The same pieces normalised if wanted, and rounded to the inputs' type. fp16 for bf16 has to take any row: what was not normalised is
// divided by a power of two, which goes to `scales`.
template <class T, class M>
__device__ __forceinline__ void normalise_rows(uint8_t* tile, const Place& place, int warp, bool l2norm, float* scales) {
  float scale[2] = {1.f, 1.f};
  uint4 x[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) x[i][j] = *reinterpret_cast<const uint4*>(tile + place(i, j));
  if (l2norm) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float y[8][4], part[4] = {};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t words[4] = {x[i][j].x, x[i][j].y, x[i][j].z, x[i][j].w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float2 pair = Pair<T>::unpack(words[n]);
          y[2 * j + n / 2][n % 2 * 2] = pair.x, y[2 * j + n / 2][n % 2 * 2 + 1] = pair.y;
        }
      }
      pin(y);  // or they would be unpacked twice
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) part[n] = fmaf(y[j][n], y[j][n], part[n]);
      float sum = (part[0] + part[1]) + (part[2] + part[3]);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      // One step of Newton's on the approximate root: as good as 1 / sqrt in float32.
      const float root = norm_factor(sum), half = 0.5f * (sum + 1e-6f);
      const float factor = fmaf(root, fmaf(-half * root, root, 0.5f), root);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const auto word = [&](int n) {
          const auto& from = y[2 * j + n / 2];
          const uint32_t rounded = Pair<T>::pack(from[n % 2 * 2] * factor, from[n % 2 * 2 + 1] * factor);
          if constexpr (std::is_same_v<T, M>) return rounded;
          const float2 pair = Pair<T>::unpack(rounded);
          return Pair<M>::pack(pair.x, pair.y);
        };
        x[i][j] = make_uint4(word(0), word(1), word(2), word(3));
      }
    }
  } else if constexpr (!std::is_same_v<T, M>) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // The largest absolute value, in bf16, and a product with a power of two: both exact.
      __nv_bfloat162 pairs = __float2bfloat162_rn(0.f);
#pragma unroll
      for (int j = 0; j < 4; j++)
        each_word(x[i][j], [&](uint32_t& word) { pairs = __hmax2(pairs, __habs2(*reinterpret_cast<__nv_bfloat162*>(&word))); });
      float largest = fmaxf(__low2float(pairs), __high2float(pairs));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      // 2^e of it, where that and its inverse are normal numbers: zeros, infinities and NaN stay as they are.
      const uint32_t exponent = __float_as_uint(largest) >> 23;
      float inverse = 1.f;
      if (exponent > 1 && exponent < 253) scale[i] = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
      const __nv_bfloat162 by = __float2bfloat162_rn(inverse);
#pragma unroll
      for (int j = 0; j < 4; j++)
        each_word(x[i][j], [&](uint32_t& word) {
          __nv_bfloat162 product = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&word), by);
          const float2 pair = Pair<T>::unpack(*reinterpret_cast<uint32_t*>(&product));
          word = Pair<M>::pack(pair.x, pair.y);
        });
    }
  }
  if (l2norm || !std::is_same_v<T, M>)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) *reinterpret_cast<uint4*>(tile + place(i, j)) = x[i][j];
  const int row = tile_row(warp);
  if (threadIdx.x % 4 == 0) scales[row] = scale[0], scales[row + 8] = scale[1];
}

// --- matrices ------------------------------------------------------------------------------------------------------------

// A 16x16 block as accumulators: [columns 0-7, 8-15][element]; and the same rounded to TF32, as operands of products. The
// eight k of a product come in the order 0, 2, 4, 6, 1, 3, 5, 7, so that a lane has what it needs.
using Block = float[2][4];
struct Left {
  uint32_t x[2][4];
};
struct Right {  // transposed
  uint32_t x[2][4];
};

__device__ __forceinline__ Left round_left(const Block& from) {
  Left to;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < 4; i++) to.x[h][i] = round_to_tf32(from[h][i / 2 + i % 2 * 2]);
  return to;
}
__device__ __forceinline__ Right round_right(const Block& from) {
  Right to;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < 4; i++) to.x[h][i] = round_to_tf32(from[h][i]);
  return to;
}

// `triangle`: what b has above its diagonal are zeros.
template <bool triangle = false>
__device__ __forceinline__ void multiply(Block& d, const Left& a, const Right& b) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int n = 0; n < (triangle && h == 0 ? 1 : 2); n++) mma_tf32(d[n], a.x[h], b.x[h][2 * n], b.x[h][2 * n + 1]);
}

// Columns times factors, of tokens from `token` on.
__device__ __forceinline__ void scale_columns(Block& x, const float* factors, int token, int q) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 by = *reinterpret_cast<const float2*>(factors + token + 8 * h + 2 * q);
#pragma unroll
    for (int e = 0; e < 2; e++) x[h][2 * e] *= by.x, x[h][2 * e + 1] *= by.y;
  }
}

// This lane's words of a block's four tiles of 8x8.
template <class M>
__device__ __forceinline__ void put_tiles(char* block, const Block& x, int lane) {
  auto* to = reinterpret_cast<uint32_t*>(block) + lane;
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int h = 0; h < 2; h++) to[64 * e + 32 * h] = Pair<M>::pack(x[h][2 * e], x[h][2 * e + 1]);
}
// Block (i, j) of a record's matrix.
__device__ __forceinline__ char* block_at(char* matrix, int i, int j) { return matrix + strip_at(j) + (3 - i) * 512; }
template <class M>
__device__ __forceinline__ void store_block(char* matrix, int i, int j, const Block& x, int lane) {
  put_tiles<M>(block_at(matrix, i, j), x, lane);
}

// The diagonal block of an inverse, from where it lies transposed; and what of it is below its diagonal.
__device__ __forceinline__ void load_diagonal(Block& x, Block& below, const float* block) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int target = g + e / 2 * 8, source = 8 * h + 2 * q + e % 2;
      x[h][e] = h == 1 && e < 2 ? 0.f : block[source * kStride + target];
      below[h][e] = (h == 0 && e >= 2) || 2 * q + e % 2 < g ? x[h][e] : 0.f;
    }
}

// Decays from token to token within this warp's 16: f(e, h, decay, beta) for targets g + 8 e and sources 8 h + 2 q and the next; beta is the target's, or 1
// where the source's is in the decay. Above the diagonal a decay means nothing and may be infinite, and that block's upper right part is left out.
template <class M, class F>
__device__ __forceinline__ void each_decay(const Gates& gates, int warp, F&& f) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool any_zeros = gates.zeros[kChunk - 1] != 0;  // alpha = 0 is rare
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int row = 16 * warp + g + 8 * e;
    const float sum = gates.sum[row], beta = kBetaAtSources<M> ? 1.f : gates.beta[row];
#pragma unroll
    for (int h = 0; h <= e; h++) {
      const int column = 16 * warp + 8 * h + 2 * q;
      const float2 sums = *reinterpret_cast<const float2*>(&gates.sum[column]);
      float decay[2] = {exp2_approximate(sum - sums.x), exp2_approximate(sum - sums.y)};
      if constexpr (kBetaAtSources<M>) {
        const float2 betas = *reinterpret_cast<const float2*>(&gates.beta[column]);
        decay[0] *= betas.x, decay[1] *= betas.y;
      }
      if (any_zeros) {
#pragma unroll
        for (int f = 0; f < 2; f++) decay[f] = gates.zeros[row] == gates.zeros[column + f] ? decay[f] : 0.f;
      }
      f(e, h, decay, beta);
    }
  }
}
// This warp's diagonal block of L, into shared memory: `lower` is lower_place() there, `keys` the block of K K^T. What L is on and above the diagonal is
// not read.
__device__ __forceinline__ float* lower_place(float* diagonals, int warp) {
  const int lane = threadIdx.x % 32;
  return diagonals + warp * kPitch + lane / 4 * kStride + lane % 4 * 2;
}
__device__ __forceinline__ void put_lower(float* lower, const Block& keys, int e, int h, const float (&decay)[2], float beta) {
  *reinterpret_cast<float2*>(lower + 8 * e * kStride + 8 * h) = make_float2(beta * keys[h][2 * e] * decay[0], beta * keys[h][2 * e + 1] * decay[1]);
}
// And of the scores, from that of scale Q K^T: above the diagonal selected away.
__device__ __forceinline__ void set_scores(Block& scores, const Block& queries, int e, int h, const float (&decay)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int f = 0; f < 2; f++) scores[h][2 * e + f] = h < e || lane % 4 * 2 + f <= lane / 4 ? queries[h][2 * e + f] * decay[f] : 0.f;
}

// Below the diagonal a decay is a product of three factors, all at most 1: from the source to the end of its 16 tokens, from
// there to the start of the target's, and from there to the target. The one between, of the 16 tokens of block j:
__device__ __forceinline__ float across(const Gates& gates, int j) { return j == 1 ? gates.before[31] : j == 2 ? gates.before[47] : 1.f; }

// This warp's row of blocks left of the diagonal, with these decays: put(j, x), block j of it. `by`: factors of its rows g and g + 8, with the
// decay from the start of its 16 tokens.
template <class Put>
__device__ __forceinline__ void each_left_block(Put&& put, const Gates& gates, const float (&products)[8][4], float (&by)[2], int warp) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int j = 2; j >= 0; j--)
    if (j < warp) {
      Block x;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float2 after = *reinterpret_cast<const float2*>(&gates.after[16 * j + 8 * h + 2 * q]);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          x[h][2 * e] = products[2 * j + h][2 * e] * (by[e] * after.x);
          x[h][2 * e + 1] = products[2 * j + h][2 * e + 1] * (by[e] * after.y);
        }
      }
      put(j, x);
      const float next = across(gates, j);
      by[0] *= next, by[1] *= next;
    }
}
// Block `which` of a row.
__device__ __forceinline__ void select_block(Block& x, const float (&row)[8][4], int which) {
#pragma unroll
  for (int b = 0; b < 4; b++)
    if (b == which)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[h][i] = row[2 * b + h][i];
}

}  // namespace sm90
}  // namespace gdn
#endif
