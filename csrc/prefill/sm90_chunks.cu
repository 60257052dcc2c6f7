// Prefill on sm_90a, first kernel: what a chunk of 64 tokens needs that does not depend on the state, all chunks and heads at
// once. The mathematics and the care for alpha = 0 are those of chunks.cu; what is left behind: normalised tiles of q and k
// and the triangular matrices, as the copy engine and wgmma want them (sm90_workspace.cuh).
//
// One CTA of four warps makes a chunk for one head of q and k and up to four state heads that share them. K K^T and Q K^T
// are products of the warpgroup and go round through shared memory, 16x16 blocks in the order of mma fragments. Then a warp
// makes one state head's matrices, alone: everything but the diagonal blocks' substitution stays in its registers, and no
// warp waits for another. `M` is the type of the operands that are left: the inputs' own, or fp16, whose mantissa is
// three bits longer.
#include "sequence.cuh"
#include "sm90_workspace.cuh"

#if GDN_SM90
#include "../common/sm90_primitives.cuh"
#endif

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadsAtMost = kWarps;
constexpr int kBlocks = 10;               // 16x16 blocks on and below the diagonal
constexpr int kStride = 16 + 4;           // floats, of a diagonal block's rows: fragments and columns fall into different banks
constexpr int kDiagonals = kChunk * kStride;

struct Gates {
  float sum[kChunk];     // of log2(alpha), from the chunk's start to here
  float beta[kChunk];
  float before[kChunk];  // decay from the end of the 16 tokens before to here
  float after[kChunk];   // decay from here to the end of these 16
  int zeros[kChunk];
};
struct Rows {
  float k_scale[kChunk], q_scale[kChunk];  // powers of two: the tiles' rows times these are k and q
  float squares[kChunk];                   // |k|^2
};

// Shared memory: the tiles of k and q, and in their place, when they are done with, the warps' diagonal blocks and both
// products; the gates. Four CTAs a multiprocessor.
constexpr int kProducts = kWarps * kDiagonals * 4;
constexpr int kProductsEnd = kProducts + 2 * kBlocks * 32 * 8 * 4;
constexpr int kGates = kProductsEnd > 2 * kTileBytes ? kProductsEnd : 2 * kTileBytes;
constexpr int kBytes = 1024 + kGates + kHeadsAtMost * int(sizeof(Gates)) + int(sizeof(Rows));
static_assert(4 * (kBytes + 1024) <= 228 << 10, "shared memory of a multiprocessor");

__device__ __forceinline__ int tile_at(int row, int piece) { return piece / 8 * 8192 + row * 128 + ((piece ^ row) & 7) * 16; }

// --- gates -------------------------------------------------------------------------------------------------------------

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

__device__ __forceinline__ void make_gates(const PrefillParams& p, Gates& gates, const GateBits& x, int from, int to) {
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
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    gates.sum[t] = sum[i], gates.beta[t] = beta[i], gates.zeros[t] = zeros[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i, end = t | 15, start = t < 16 ? 0 : t / 16 * 16 - 1;
    gates.before[t] = gates.zeros[start] == zeros[i] ? exp2_approximate(sum[i] - gates.sum[start]) : 0.f;
    gates.after[t] = gates.zeros[end] == zeros[i] ? exp2_approximate(gates.sum[end] - sum[i]) : 0.f;
  }
  __syncwarp();
}

// What the recurrence wants of them, with the scales of the tiles' rows, by the warp that made them.
__device__ __forceinline__ void write_gates(float* out, const Gates& gates, const Rows& rows, float scale, bool bound) {
  const int lane = threadIdx.x % 32;
  const float last = gates.sum[kChunk - 1];
  const int zeros_last = gates.zeros[kChunk - 1];
  float gamma = 0.f, log_bound = 0.f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    const float sum = gates.sum[t], beta = gates.beta[t], k_scale = rows.k_scale[t];
    gamma = gates.zeros[t] == 0 ? exp2f(sum) : 0.f;
    out[kBeta * kChunk + t] = beta;
    out[kBetaGamma * kChunk + t] = beta * gamma * k_scale;
    out[kScaleGamma * kChunk + t] = scale * gamma * rows.q_scale[t];
    out[kTail * kChunk + t] = gates.zeros[t] == zeros_last ? exp2f(last - sum) * k_scale : 0.f;
    // A token's transition alpha (I - beta k k^T) has the norm alpha max(1, |1 - beta |k|^2|).
    if (bound) log_bound += log2f(fmaxf(1.f, fabsf(1.f - beta * rows.squares[t])));
  }
  if (bound)
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) log_bound += __shfl_xor_sync(0xffffffffu, log_bound, offset);
  if (lane == 31) *reinterpret_cast<float2*>(out + kEnd * kChunk) = make_float2(gamma, last - 300.f * zeros_last + log_bound);
}

// --- tiles -------------------------------------------------------------------------------------------------------------

// This thread's pieces of a tile of q or k: rows threadIdx.x / 16 + 8 i. Rows that are no tokens are zeros.
__device__ __forceinline__ void load_rows(uint4 (&x)[8], const void* data, int64_t stride, bool aligned, int64_t token, int from, int to) {
  const int row0 = threadIdx.x / 16, piece = threadIdx.x % 16;
  const uint16_t* source = static_cast<const uint16_t*>(data) + (token + row0) * stride + 8 * piece;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = row0 + 8 * i;
    x[i] = make_uint4(0, 0, 0, 0);
    if (row >= from && row < to) {
      if (aligned) {
        x[i] = *reinterpret_cast<const uint4*>(source);
      } else {
        const auto pair = [&](int j) { return uint32_t(source[j]) | uint32_t(source[j + 1]) << 16; };
        x[i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
    }
    source += 8 * stride;
  }
}

// Into shared memory, normalised if wanted; and out, the same image. fp16 for bf16 has to take any row: what was not
// normalised is divided by a power of two, which goes to `scales`.
template <class T, class M>
__device__ __forceinline__ void store_rows(uint8_t* tile, uint4 (&x)[8], bool l2norm, char* copy, float* scales) {
  const int row0 = threadIdx.x / 16, piece = threadIdx.x % 16;
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

__device__ __forceinline__ void multiply(Block& d, const Left& a, const Right& b) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int n = 0; n < 2; n++) mma_tf32(d[n], a.x[h], b.x[h][2 * n], b.x[h][2 * n + 1]);
}

// Where block (i, j) of Q K^T, targets by sources, and block (j, i) of K K^T, sources by targets, lie; j <= i.
__host__ __device__ constexpr int scores_block(int i, int j) { return kBlocks + i * (i + 1) / 2 + j; }
__host__ __device__ constexpr int keys_block(int j, int i) { return 4 * j - j * (j - 1) / 2 + i - j; }

__device__ __forceinline__ void load_block(Block& x, const float4* products, int number, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float4 y = products[(2 * number + h) * 32 + lane];
    x[h][0] = y.x, x[h][1] = y.y, x[h][2] = y.z, x[h][3] = y.w;
  }
}

// Block (i, j) of a record's matrix; this lane's words of its four tiles.
template <class M>
__device__ __forceinline__ void store_block(char* matrix, int i, int j, const Block& x, int lane) {
  auto* to = reinterpret_cast<uint32_t*>(matrix + strip_at(j) + (i - j) * 512) + lane;
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int h = 0; h < 2; h++) to[64 * e + 32 * h] = Pair<M>::pack(x[h][2 * e], x[h][2 * e + 1]);
}

// Columns of the inverses of I + L for two 16x16 blocks, by substitution. Above the diagonal zeros, unless L is not finite.
__device__ __forceinline__ void invert(float (&x)[2][16], const float* lower, int distance, int column) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float sum[2][2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      sum[b][0] = column == i ? 1.f : 0.f, sum[b][1] = 0.f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = *reinterpret_cast<const float4*>(lower + b * distance + i * kStride + m);
        sum[b][0] = fmaf(-l.x, x[b][m], sum[b][0]);
        if (m + 1 < i) sum[b][1] = fmaf(-l.y, x[b][m + 1], sum[b][1]);
        if (m + 2 < i) sum[b][0] = fmaf(-l.z, x[b][m + 2], sum[b][0]);
        if (m + 3 < i) sum[b][1] = fmaf(-l.w, x[b][m + 3], sum[b][1]);
      }
      x[b][i] = sum[b][0] + sum[b][1];
    }
  }
}

// Coupling and scores of one head, by one warp. `diagonals` is its own scratch.
template <class M>
__device__ __forceinline__ void make_matrices(char* record, const Gates& gates, const float4* products, float* diagonals, float scale) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  char* scores = record + kScoresAt;
  const bool any_zeros = gates.zeros[kChunk - 1] != 0;

  // Diagonal blocks: decays from token to token.
#pragma unroll
  for (int b = 0; b < 4; b++) {
    Block keys, s;
    load_block(keys, products, keys_block(b, b), lane);
    load_block(s, products, scores_block(b, b), lane);
    float* lower = diagonals + (16 * b + g) * kStride + 2 * q;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = 16 * b + g + 8 * e;
      const float sum = gates.sum[row], beta = gates.beta[row];
#pragma unroll
      for (int h = 0; h <= e; h++) {
        const int column = 16 * b + 8 * h + 2 * q;
        const float2 sums = *reinterpret_cast<const float2*>(&gates.sum[column]);
        float decay[2] = {exp2_approximate(sum - sums.x), exp2_approximate(sum - sums.y)};
        if (any_zeros) {
#pragma unroll
          for (int f = 0; f < 2; f++) decay[f] = gates.zeros[row] == gates.zeros[column + f] ? decay[f] : 0.f;
        }
        // What L is on and above the diagonal is not read.
        *reinterpret_cast<float2*>(lower + 8 * e * kStride + 8 * h) =
            make_float2(beta * keys[h][2 * e] * decay[0], beta * keys[h][2 * e + 1] * decay[1]);
        // Above the diagonal a decay means nothing and may be infinite: selected away.
#pragma unroll
        for (int f = 0; f < 2; f++) s[h][2 * e + f] = column + f <= row ? scale * s[h][2 * e + f] * decay[f] : 0.f;
      }
    }
    s[1][0] = s[1][1] = 0.f;
    store_block<M>(scores, b, b, s, lane);
  }
  __syncwarp();

  // Their inverses: lanes 0 to 15 take blocks 0 and 2, the others 1 and 3. Left behind transposed.
  {
    float x[2][16];
    float* mine = diagonals + lane / 16 * 16 * kStride;
    invert(x, mine, 32 * kStride, lane % 16);
    __syncwarp();
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        *reinterpret_cast<float4*>(mine + (32 * b + lane % 16) * kStride + 4 * i) =
            make_float4(x[b][4 * i], x[b][4 * i + 1], x[b][4 * i + 2], x[b][4 * i + 3]);
    __syncwarp();
  }

  // Below the diagonal a decay is one of three factors, all at most 1: from the source to the end of its 16 tokens, from there
  // to the start of the target's, and from there to the target.
  float across[4][4];
  across[2][0] = gates.before[31], across[3][1] = gates.before[47], across[3][0] = across[2][0] * across[3][1];
#pragma unroll
  for (int i = 1; i < 4; i++)
#pragma unroll
    for (int j = 0; j < i; j++) {
      Block s;
      load_block(s, products, scores_block(i, j), lane);
      float by[2] = {scale * gates.before[16 * i + g], scale * gates.before[16 * i + g + 8]};
      if (j < i - 1) by[0] *= across[i][j], by[1] *= across[i][j];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float2 after = *reinterpret_cast<const float2*>(&gates.after[16 * j + 8 * h + 2 * q]);
#pragma unroll
        for (int e = 0; e < 2; e++) s[h][2 * e] *= by[e] * after.x, s[h][2 * e + 1] *= by[e] * after.y;
      }
      store_block<M>(scores, i, j, s, lane);
    }
  // The inverse by rows of blocks: inverse[i, j] = -(sum over m from j + 1 to i of inverse[i, m] L[m, j]) inverse[j, j].
  Right lower[4][4], transposed[3];  // -L and the diagonal blocks
#pragma unroll
  for (int i = 0; i < 4; i++) {
    __syncwarp();  // no load of this row goes before: registers are scarce
    Left row[4];
    {
      Block x, below;
      const float* block = diagonals + 16 * i * kStride;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int target = g + e / 2 * 8, source = 8 * h + 2 * q + e % 2;
          x[h][e] = h == 1 && e < 2 ? 0.f : block[source * kStride + target];
          below[h][e] = source < target ? x[h][e] : 0.f;
        }
      store_block<M>(record, i, i, below, lane);  // without the identity
      row[i] = round_left(x);
      if (i < 3) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float2 pair = make_float2(0.f, 0.f);
            if (h >= e) pair = *reinterpret_cast<const float2*>(block + (g + 8 * e) * kStride + 8 * h + 2 * q);
            x[h][2 * e] = pair.x, x[h][2 * e + 1] = pair.y;
          }
        transposed[i] = round_right(x);
      }
    }
    float2 by[2];  // of targets: -beta and the decay from the start of their 16 tokens
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int target = 16 * i + 8 * h + 2 * q;
      const float2 before = *reinterpret_cast<const float2*>(&gates.before[target]);
      const float2 beta = *reinterpret_cast<const float2*>(&gates.beta[target]);
      by[h] = make_float2(-beta.x * before.x, -beta.y * before.y);
    }
#pragma unroll
    for (int j = i - 1; j >= 0; j--) {
      Block l;
      load_block(l, products, keys_block(j, i), lane);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float after = gates.after[16 * j + g + 8 * e];
        if (j < i - 1) after *= across[i][j];
#pragma unroll
        for (int h = 0; h < 2; h++) l[h][2 * e] *= after * by[h].x, l[h][2 * e + 1] *= after * by[h].y;
      }
      lower[i][j] = round_right(l);
      Block sum = {}, x = {};
#pragma unroll
      for (int m = j + 1; m <= i; m++) multiply(sum, row[m], lower[m][j]);
      multiply(x, round_left(sum), transposed[j]);
      store_block<M>(record, i, j, x, lane);
      if (j > 0) row[j] = round_left(x);
    }
  }
}

// Grid: x = slot, y = share of the pass's heads.
template <class T, class M>
__global__ void __launch_bounds__(32 * kWarps, 4) chunks(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan) {
  GDN_SHARED(unaligned);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int64_t slot = blockIdx.x;
  let_next_start();
  const int index = find_sequence(p, slot);
  if (index < 0) return;
  const Sequence sequence = get_sequence(p, index);
  const int64_t c = slot - sequence.slot(index);
  if (c >= sequence.chunks) return;
  const int64_t token = sequence.first_token(c);
  const int from = sequence.from(c), to = sequence.to(c);
  const int first_head = plan.first_head + blockIdx.y * plan.heads_a_block;
  const int kh = first_head / p.k_group, qh = first_head / p.q_group;

  uint8_t* shared = align_shared(unaligned, 1024);
  uint8_t *k_tile = shared, *q_tile = shared + kTileBytes;
  auto* products = reinterpret_cast<float4*>(shared + kProducts);
  auto* gates = reinterpret_cast<Gates*>(shared + kGates);
  auto& rows = *reinterpret_cast<Rows*>(gates + kHeadsAtMost);

  {
    GateBits bits;
    uint4 k[8], q[8];
    if (warp < plan.heads_a_block) load_gates(bits, p, token, from, to, first_head + warp);
    load_rows(k, static_cast<const uint16_t*>(p.k) + kh * p.k_stride.head, p.k_stride.token, p.k_aligned, token, from, to);
    load_rows(q, static_cast<const uint16_t*>(p.q) + qh * p.q_stride.head, p.q_stride.token, p.q_aligned, token, from, to);
    if (warp < plan.heads_a_block) make_gates(p, gates[warp], bits, from, to);
    const int heads_q = p.heads / p.q_group, heads_k = p.heads / p.k_group;
    // Of the CTAs that share a head of q or k, the one with its first state head leaves the tile.
    char* k_copy = first_head % p.k_group == 0 ? plan.k_tiles + (slot * heads_k + kh) * kTileBytes : nullptr;
    char* q_copy = first_head % p.q_group == 0 ? plan.q_tiles + (slot * heads_q + qh) * kTileBytes : nullptr;
    store_rows<T, M>(k_tile, k, p.l2norm, k_copy, rows.k_scale);
    store_rows<T, M>(q_tile, q, p.l2norm, q_copy, rows.q_scale);
  }
  fence_async_proxy();
  __syncthreads();

  // Rows 16 warp.. of K K^T and Q K^T.
  float kk[8][4], qk[8][4];
  const auto multiply_rows = [&](float(&d)[8][4], const uint8_t* tile) {
    uint32_t a[32];
#pragma unroll
    for (int k = 0; k < 8; k++) {
      uint32_t x[4];
      load_tiles(x, tile + tile_at(16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; i++) a[4 * k + i] = x[i];
    }
    pin(a);
    const auto columns = describe(k_tile, Layout::swizzled, 16, 1024);
    multiply_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_k_major<M>(d, a + 4 * k, columns + (k / 4 * 8192 + k % 4 * 32), k > 0);
    multiply_commit();
    multiply_wait<0>();
    pin(d);
  };
  multiply_rows(kk, k_tile);
  multiply_rows(qk, q_tile);
  __syncthreads();  // the tiles are done with
#pragma unroll
  for (int n = 0; n < 8; n++) {
    if constexpr (!std::is_same_v<T, M>) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = 16 * warp + g + i / 2 * 8, column = 8 * n + 2 * q + i % 2;
        kk[n][i] *= rows.k_scale[row] * rows.k_scale[column];
        qk[n][i] *= rows.q_scale[row] * rows.k_scale[column];
      }
    }
    if (n / 2 >= warp) {
      products[(2 * keys_block(warp, n / 2) + n % 2) * 32 + lane] = make_float4(kk[n][0], kk[n][1], kk[n][2], kk[n][3]);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (8 * n + 2 * q + i % 2 == 16 * warp + g + i / 2 * 8) rows.squares[16 * warp + g + i / 2 * 8] = kk[n][i];
    }
    if (n / 2 <= warp)
      products[(2 * scores_block(warp, n / 2) + n % 2) * 32 + lane] = make_float4(qk[n][0], qk[n][1], qk[n][2], qk[n][3]);
  }
  __syncthreads();  // the products are there
  if (warp >= plan.heads_a_block) return;
  char* record = plan.record(slot, first_head + warp);
  write_gates(reinterpret_cast<float*>(record + kGatesAt), gates[warp], rows, p.scale, plan.path.segment > 0);
  make_matrices<M>(record, gates[warp], products, reinterpret_cast<float*>(shared) + warp * kDiagonals, p.scale);
}

template <class T, class M>
void launch(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  static bool allowed[64] = {};  // by device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64 || !allowed[device]) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(chunks<T, M>), cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
          "cudaFuncSetAttribute");
    if (device < 64) allowed[device] = true;
  }
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
