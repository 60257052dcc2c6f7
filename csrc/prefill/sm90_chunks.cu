// Prefill on sm_90a, first kernel: what a chunk of 64 tokens needs that does not depend on the state, all chunks and heads at
// once. The mathematics and the care for alpha = 0 are those of chunks.cu, but for where beta is (kBetaAtSources); what is left behind: the triangular
// matrices and, where the recurrence cannot read q and k in place, tiles of them, as the copy engine and wgmma want them (sm90_workspace.cuh).
//
// One CTA of four warps makes a chunk for one head of q and k and up to four state heads that share them. For the sake of shared
// memory and L1 each warp keeps what it has: K K^T and Q K^T are products of the warpgroup, and of its 16 rows of them a warp
// makes the diagonal blocks and the scores of all heads straight from the accumulators. Only K K^T off the diagonal goes round through
// shared memory, 16x16 blocks in the order of mma fragments: from it a warp makes the inverse of one state head, alone, in its
// registers. `M` is the type of the operands that are left: the inputs' own, or fp16, whose mantissa is three bits longer.
#include <algorithm>
#include <cstring>

#include "sm90_chunk_steps.cuh"

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadsAtMost = kWarps;
constexpr int kTogether = 5;              // CTAs that a multiprocessor holds at most
constexpr int kSlotsY = 32768;            // of the grid's y
constexpr int kBlocks = 6;                // 16x16 blocks of K K^T off the diagonal
constexpr int kDiagonals = 4 * kPitch;    // floats of a head

struct Rows {
  float k_scale[kChunk], q_scale[kChunk];  // the tiles' rows times these are k and q; only where operands are fp16 for bf16 inputs
  float squares[kChunk];                   // |k|^2
  uint64_t landed;                         // barrier: the copy engine has brought the tiles
};

// Shared memory: the tiles of k and q, and in their place, when they are done with, the heads' diagonal blocks and K K^T;
// the gates. Five CTAs a multiprocessor, four where rows are scaled.
constexpr int kProducts = kHeadsAtMost * kDiagonals * 4;
constexpr int kProductsEnd = kProducts + kBlocks * 32 * 8 * 4;
constexpr int kGates = kProductsEnd > 2 * kTileBytes ? kProductsEnd : 2 * kTileBytes;
constexpr int kBytes = 1024 + kGates + kHeadsAtMost * int(sizeof(Gates)) + int(sizeof(Rows));
static_assert(kTogether * (kBytes + 1024) <= 228 << 10, "shared memory of a multiprocessor");

// Where block (j, i) of K K^T, sources by targets, lies; j < i. It is rounded for TF32.
__host__ __device__ constexpr int keys_block(int j, int i) { return j * (7 - j) / 2 + i - j - 1; }

// The same of four heads at once (Plan::wide_gates), by way of shared memory, where each head's warp finds its bits: a load a token
// instead of four, each of which would bring 32 bytes for 4.
__device__ __forceinline__ void load_wide_gates(Gates* gates, const PrefillParams& p, int64_t token, int from, int to, int first_head) {
  const int t = threadIdx.x % kChunk;
  const bool beta = threadIdx.x / kChunk == 1;
  const auto load = [&](const void* data, const Strides3& stride, DType dtype) {
    const int size = dtype == DType::f32 ? 4 : 2;
    const char* address = static_cast<const char*>(data) + ((token + t) * stride.token + first_head) * size;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (t < from || t >= to) return x;
    if (size == 4) return *reinterpret_cast<const uint4*>(address);
    const uint2 pairs = *reinterpret_cast<const uint2*>(address);
    return make_uint4(pairs.x & 0xffff, pairs.x >> 16, pairs.y & 0xffff, pairs.y >> 16);
  };
  if (beta ? p.beta == nullptr : p.gate == Gate::none) return;
  const uint4 x = beta ? load(p.beta, p.beta_stride, p.beta_dtype) : load(p.g, p.g_stride, p.g_dtype);
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int h = 0; h < 4; h++) (beta ? gates[h].beta : gates[h].sum)[t] = __uint_as_float(words[h]);
}
__device__ __forceinline__ void find_gates(GateBits& x, const Gates& gates, const PrefillParams& p, int h) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.g[i] = p.gate != Gate::none ? __float_as_uint(gates.sum[lane + 32 * i]) : 0;
    x.beta[i] = p.beta != nullptr ? __float_as_uint(gates.beta[lane + 32 * i]) : 0;
  }
  x.g_shift = x.beta_shift = 0;
  load_raw_gate(x, p, h);
}

// What the recurrence wants of them, with the scales of the tiles' rows if they are scaled, by a warp.
template <bool scaled, class M>
__device__ __forceinline__ void write_gates(float* out, const Gates& gates, const Rows& rows, float scale, bool bound) {
  const int lane = threadIdx.x % 32;
  const float last = gates.sum[kChunk - 1];
  const int zeros_last = gates.zeros[kChunk - 1];
  constexpr bool at_sources = kBetaAtSources<M>;
  float gamma = 0.f, log_bound = 0.f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane + 32 * i;
    const float sum = gates.sum[t], beta = gates.beta[t];
    const float k_scale = scaled ? rows.k_scale[t] : 1.f, q_scale = scaled ? rows.q_scale[t] : 1.f;
    gamma = gates.zeros[t] == 0 ? exp2f(sum) : 0.f;
    out[kGamma * kChunk + t] = gamma * k_scale * (at_sources ? 1.f : beta);
    out[kScaleGamma * kChunk + t] = scale * gamma * q_scale;
    out[kTail * kChunk + t] = gates.zeros[t] == zeros_last ? exp2f(last - sum) * k_scale * (at_sources ? beta : 1.f) : 0.f;
    if (!at_sources) out[kBetaAt + t] = beta;
    // A token's transition alpha (I - beta k k^T) has the norm alpha max(1, |1 - beta |k|^2|).
    if (bound) log_bound += log2f(fmaxf(1.f, fabsf(1.f - beta * rows.squares[t])));
  }
  if (bound)
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) log_bound += __shfl_xor_sync(0xffffffffu, log_bound, offset);
  gamma = __shfl_sync(0xffffffffu, gamma, 31);
  if (lane < 4) reinterpret_cast<float2*>(out + kDecayAt)[lane] = make_float2(gamma, last - 300.f * zeros_last + log_bound);
}

// This lane's pieces on their way to shared memory. Rows that are no tokens are zeros. `again`: the recurrence may read them too.
template <bool again>
__device__ __forceinline__ void fetch_rows(uint8_t* tile, const Place& place, const void* data, int64_t stride, bool aligned, int64_t token,
                                           int from, int to) {
  const int row = tile_row(threadIdx.x / 32);
  const uint16_t* source = static_cast<const uint16_t*>(data) + (token + row) * stride + threadIdx.x % 4 * 8;
  const bool valid[2] = {row >= from && row < to, row + 8 >= from && row + 8 < to};
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (again)
          copy_async(tile + place(i, j), source + i * 8 * stride + 32 * j, valid[i]);
        else
          copy_once(tile + place(i, j), source + i * 8 * stride + 32 * j, valid[i]);
      }
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll 1
      for (int j = 0; j < 4; j++) {
        const uint16_t* x = source + i * 8 * stride + 32 * j;
        const auto pair = [&](int n) { return uint32_t(x[n]) | uint32_t(x[n + 1]) << 16; };
        *reinterpret_cast<uint4*>(tile + place(i, j)) = valid[i] ? make_uint4(pair(0), pair(2), pair(4), pair(6)) : make_uint4(0, 0, 0, 0);
      }
  }
}

__device__ __forceinline__ void load_right(Right& x, const float4* products, int number, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 y = reinterpret_cast<const uint4*>(products)[(2 * number + h) * 32 + lane];
    x.x[h][0] = y.x, x.x[h][1] = y.y, x.x[h][2] = y.z, x.x[h][3] = y.w;
  }
}

// Columns `column` and `column` + 8 of the inverse of I + L, a 16x16 block, by substitution. In 8x8 blocks, [A 0, C B]: the
// columns are [x, y] and [0, z]. Above the diagonal zeros, unless L is not finite.
__device__ __forceinline__ void invert(float (&x)[8], float (&y)[8], float (&z)[8], const float* lower, int column) {
  const auto subtract = [](float(&sum)[2], const float4& l, const float* from, int m, int end) {
    sum[0] = fmaf(-l.x, from[m], sum[0]);
    if (m + 1 < end) sum[1] = fmaf(-l.y, from[m + 1], sum[1]);
    if (m + 2 < end) sum[0] = fmaf(-l.z, from[m + 2], sum[0]);
    if (m + 3 < end) sum[1] = fmaf(-l.w, from[m + 3], sum[1]);
  };
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float sum[2] = {column == i ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) subtract(sum, *reinterpret_cast<const float4*>(lower + i * kStride + m), x, m, i);
    x[i] = sum[0] + sum[1];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float* row = lower + (8 + i) * kStride;
    float sum_y[2] = {}, sum_z[2] = {column == i ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < 8; m += 4) subtract(sum_y, *reinterpret_cast<const float4*>(row + m), x, m, 8);
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(row + 8 + m);
      subtract(sum_y, l, y, m, i);
      subtract(sum_z, l, z, m, i);
    }
    y[i] = sum_y[0] + sum_y[1], z[i] = sum_z[0] + sum_z[1];
  }
}

// Coupling of one head, by one warp. `diagonals` are the head's.
template <class M>
__device__ __forceinline__ void make_coupling(char* record, const Gates& gates, const float4* products, float* diagonals) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

  // The diagonal blocks' inverses, a block for eight lanes. Left behind transposed.
  {
    float x[8], y[8], z[8];
    const int column = lane % 8;
    float* mine = diagonals + lane / 8 * kPitch;
    invert(x, y, z, mine, column);
    __syncwarp();
    const auto store = [&](int source, int target, const float(&from)[8]) {
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        *reinterpret_cast<float4*>(mine + source * kStride + target + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    };
    store(column, 0, x), store(column, 8, y), store(column + 8, 8, z);
    __syncwarp();
  }

  // The inverse by rows of blocks: inverse[i, j] = -(sum over m from j + 1 to i of inverse[i, m] L[m, j]) inverse[j, j]. The
  // factors of L[m, j] go elsewhere, so that K K^T itself is the operand: those of targets to inverse[i, m], those of sources
  // to inverse[j, j], those between to the sums.
  Right transposed[3];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    __syncwarp();  // no load of this row goes before: registers are scarce
    Left row[4];
    {
      Block x, below;
      const float* block = diagonals + i * kPitch;
      load_diagonal(x, below, block);
      store_block<M>(record, i, i, below, lane);  // without the identity
      if (i > 0) {
        scale_columns(x, gates.target, 16 * i, q);
        row[i] = round_left(x);
      }
      if (i < 3) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float2 pair = make_float2(0.f, 0.f);
            if (h >= e) pair = *reinterpret_cast<const float2*>(block + (g + 8 * e) * kStride + 8 * h + 2 * q);
            x[h][2 * e] = -pair.x, x[h][2 * e + 1] = -pair.y;
          }
        scale_columns(x, gates.after, 16 * i, q);
        transposed[i] = round_right(x);
      }
    }
#pragma unroll
    for (int j = i - 1; j >= 0; j--) {
      Block sum = {}, x = {};
#pragma unroll
      for (int m = i; m > j; m--) {
        if (m < i)
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[h][e] *= across(gates, m);
        Right keys;
        load_right(keys, products, keys_block(j, m), lane);
        multiply(sum, row[m], keys);
      }
      multiply<true>(x, round_left(sum), transposed[j]);
      store_block<M>(record, i, j, x, lane);
      if (j > 0) {
        scale_columns(x, gates.target, 16 * j, q);
        row[j] = round_left(x);
      }
    }
  }
}

// Quotients by the sizes of groups, made by the host; numerators are numbers of heads.
struct Groups {
  uint32_t k_reciprocal, q_reciprocal;  // 0: divide by one
  int32_t heads_k, heads_q;
};

__device__ __forceinline__ int divide(int x, uint32_t reciprocal) { return reciprocal == 0 ? x : int(uint64_t(x) * reciprocal >> 32); }

// Where a chunk's tokens lie is known two loads after the kernel has begun. Where CTAs are few, which one asks for what does not matter: each
// asks for as many tokens as come to a slot, about where its own are, and these loads find them in L2. Two warps.
__device__ __forceinline__ void prefetch_guess(const PrefillParams& p, const Plan& plan, int64_t slot, int first_head, int kh, int qh, bool tiles) {
  const int64_t about = int64_t(float(slot) * plan.tokens_a_slot), last = p.num_tokens - kChunk, guess = about < last ? about : last;
  if (guess < 0) return;
  if (threadIdx.x >= 64) {
    if (threadIdx.x == 64 && tiles && plan.mapped)
      for (int i = 0; i < 4; i++) tensor_prefetch(plan.maps[i / 2], i % 2 * 64, i < 2 ? kh : qh, int(guess));
    return;
  }
  const int64_t token = guess + threadIdx.x % 32;
  const auto prefetch = [&](const void* data, const Strides3& stride, DType dtype) {
    for (int i = 0; i < 2; i++)
      prefetch_line(static_cast<const char*>(data) + ((token + 32 * i) * stride.token + first_head * stride.head) * (dtype == DType::f32 ? 4 : 2));
  };
  if (threadIdx.x < 32 && p.gate != Gate::none) prefetch(p.g, p.g_stride, p.g_dtype);
  if (threadIdx.x >= 32 && p.beta != nullptr) prefetch(p.beta, p.beta_stride, p.beta_dtype);
}

// CTAs that start together would all wait until memory has brought all their tiles, and then leave it idle. So those of a multiprocessor
// ask one after the other, about as fast as memory answers; gates come meanwhile.
constexpr int kTurn = 1600;  // cycles
__device__ __forceinline__ void wait_until(int64_t begin, int turn) {
  while (clock64() - begin < turn * kTurn) {
  }
}

// Grid: x = share of the pass's heads, y and z = slot, the last first. Neighbours run at the same time and read what lies side
// by side: one token's heads of q, k and gates. And what the recurrence begins with is written last, and still in L2.
template <class T, class M>
__global__ void __launch_bounds__(32 * kWarps, std::is_same_v<T, M> ? kTogether : 4) chunks(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan,
                                                           const __grid_constant__ Groups groups) {
  GDN_SHARED(unaligned);
  constexpr bool same = std::is_same_v<T, M>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int64_t slot = plan.slots - 1 - (int64_t(blockIdx.z) * kSlotsY + blockIdx.y);
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0 && threadIdx.x < 2) plan.dealt[threadIdx.x] = 0;  // before any exit
  if (slot < 0) return;
  let_next_start();
  const int64_t begin = clock64();
  const int first_head = plan.first_head + blockIdx.x * plan.heads_a_block;
  const int kh = divide(first_head, groups.k_reciprocal), qh = divide(first_head, groups.q_reciprocal);
  // The how many-th CTA of its multiprocessor this is, of those that start together.
  const uint32_t number = blockIdx.y * gridDim.x + blockIdx.x, in_turn = number / plan.multiprocessors;
  const int turn = blockIdx.z == 0 && in_turn < kTogether ? in_turn : 0;
  if (plan.few) prefetch_guess(p, plan, slot, first_head, kh, qh, turn == 0);
  const int index = find_sequence(p, slot);
  if (index < 0) return;
  const Sequence sequence = get_sequence(p, index);
  const int64_t c = slot - sequence.slot(index);
  if (c >= sequence.chunks) return;
  const int64_t token = sequence.first_token(c);
  const int from = sequence.from(c), to = sequence.to(c);

  uint8_t* shared = align_shared(unaligned, 1024);
  uint8_t *k_tile = shared, *q_tile = shared + kTileBytes;
  auto* products = reinterpret_cast<float4*>(shared + kProducts);
  auto* gates = reinterpret_cast<Gates*>(shared + kGates);
  auto& rows = *reinterpret_cast<Rows*>(gates + kHeadsAtMost);

  // The tiles by the copy engine if all rows are tokens of the sequence, or else a box would bring neighbours' among them.
  const bool boxes = plan.mapped && from == 0 && to == kChunk;
  const Place place(warp);
  const auto bring_boxes = [&] {
    wait_until(begin, turn);
    barrier_arrive_expect(&rows.landed, 2 * kTileBytes);
#pragma unroll
    for (int i = 0; i < 4; i++) tensor_copy(shared + i * 8192, plan.maps[i / 2], i % 2 * 64, i < 2 ? kh : qh, int(token), &rows.landed);
  };
  if (warp == 0 && elected()) {
    barrier_init(&rows.landed, 1);
    barrier_init_done();
    if (boxes && turn < 2) bring_boxes();
  }
  if (!boxes) {
    fetch_rows<same>(k_tile, place, static_cast<const uint16_t*>(p.k) + kh * p.k_stride.head, p.k_stride.token, p.k_aligned, token, from, to);
    fetch_rows<same>(q_tile, place, static_cast<const uint16_t*>(p.q) + qh * p.q_stride.head, p.q_stride.token, p.q_aligned, token, from, to);
    copy_commit();
  }
  if (plan.wide_gates) load_wide_gates(gates, p, token, from, to, first_head);
  __syncthreads();
  if (warp < plan.heads_a_block) {
    GateBits bits;
    if (plan.wide_gates)
      find_gates(bits, gates[warp], p, first_head + warp);
    else
      load_gates(bits, p, token, from, to, first_head + warp);
    make_gates<M>(p, gates[warp], bits, from, to);
  }
  if (warp == 0 && boxes && turn >= 2 && elected()) bring_boxes();
  boxes ? barrier_wait(&rows.landed, 0) : copy_wait<0>();
  if (!boxes || p.l2norm || !same) {
#pragma unroll 1
    for (int i = 0; i < 2; i++)
      normalise_rows<T, M>(shared + i * kTileBytes, place, warp, p.l2norm, i == 0 ? rows.k_scale : rows.q_scale);
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
      // Of the CTAs that share a head of q or k, the one with its first state head leaves the tile.
      const int64_t tile = same && plan.raw ? Plan::cut_tile(index, from > 0) : slot;
      const auto store = [](char* to, const uint8_t* from) {
#pragma unroll 1
        for (int row = 0; row < 2 * kChunk; row += 16) bulk_store(to + reversed_row(row) * 128, from + row * 128, 16 * 128);
      };
      if (kh * p.k_group == first_head) store(plan.k_tiles + (tile * groups.heads_k + kh) * kTileBytes, k_tile);
      if (qh * p.q_group == first_head) store(plan.q_tiles + (tile * groups.heads_q + qh) * kTileBytes, q_tile);
    }
    __syncwarp();
  }

  // Rows 16 warp.. of K K^T and Q K^T.
  float kk[8][4], qk[8][4];
  {
    const auto k_rows = describe(k_tile, Layout::swizzled, 16, 1024), q_rows = k_rows + kTileBytes;
    multiply_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_tiles<M>(kk, k_rows + columns_at(k), k_rows + columns_at(k), k > 0);
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_tiles<M>(qk, q_rows + columns_at(k), k_rows + columns_at(k), k > 0);
    multiply_commit();
    multiply_wait<0>();
    pin(kk);
    pin(qk);
  }
  if (threadIdx.x == 0) bulk_store_wait();
  if constexpr (!same) {
    if (!p.l2norm) {
      const float *k_scale = rows.k_scale + 16 * warp + g, *q_scale = rows.q_scale + 16 * warp + g;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float2 column = *reinterpret_cast<const float2*>(&rows.k_scale[8 * n + 2 * q]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          kk[n][2 * i] *= k_scale[8 * i] * column.x, kk[n][2 * i + 1] *= k_scale[8 * i] * column.y;
          qk[n][2 * i] *= q_scale[8 * i] * column.x, qk[n][2 * i + 1] *= q_scale[8 * i] * column.y;
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) qk[n][i] *= p.scale;
  __syncthreads();  // the tiles are done with, and all gates are there

  float* diagonals = reinterpret_cast<float*>(shared);
  {
    Block keys, queries;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (b == warp)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 4; i++) keys[h][i] = kk[2 * b + h][i], queries[h][i] = qk[2 * b + h][i];
      if (b > warp)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const auto& x = kk[2 * b + h];
          uint32_t y[4];
#pragma unroll
          for (int i = 0; i < 4; i++) y[i] = round_to_tf32(x[i]);
          reinterpret_cast<uint4*>(products)[(2 * keys_block(warp, b) + h) * 32 + lane] = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
    if (q == g / 2) {
      rows.squares[16 * warp + g] = g % 2 == 0 ? keys[0][0] : keys[0][1];
      rows.squares[16 * warp + g + 8] = g % 2 == 0 ? keys[1][2] : keys[1][3];
    }
#pragma unroll 1
    for (int h = 0; h < plan.heads_a_block; h++) {
      float* lower = lower_place(diagonals + h * kDiagonals, warp);
      Block scores = {};
      each_decay<M>(gates[h], warp, [&](int e, int half, const float(&decay)[2], float beta) {
        put_lower(lower, keys, e, half, decay, beta);
        set_scores(scores, queries, e, half, decay);
      });
      store_block<M>(plan.record(slot, first_head + h) + kScoresAt, warp, warp, scores, lane);
    }
  }
  __syncthreads();  // blocks of L and of K K^T are there
  // Warps with fewer blocks of scores write gates.
#pragma unroll 1
  for (int h = 0; h < plan.heads_a_block; h++) {
    char* record = plan.record(slot, first_head + h);
    if (warp == (h == 0 ? 0 : h - 1))
      write_gates<!same, M>(reinterpret_cast<float*>(record + kGatesAt), gates[h], rows, p.scale, plan.path.segment > 0);
    float by[2] = {gates[h].before[16 * warp + g], gates[h].before[16 * warp + g + 8]};
    each_left_block([&](int j, const Block& x) { store_block<M>(record + kScoresAt, warp, j, x, lane); }, gates[h], qk, by, warp);
  }
  if (warp < plan.heads_a_block) make_coupling<M>(plan.record(slot, first_head + warp), gates[warp], products, diagonals + warp * kDiagonals);
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
  const dim3 grid(unsigned(plan.heads / plan.heads_a_block), unsigned(std::min<int64_t>(plan.slots, kSlotsY)),
                  unsigned((plan.slots + kSlotsY - 1) / kSlotsY));
  const auto reciprocal = [](int32_t x) { return x > 1 ? uint32_t((uint64_t(1) << 32) / x + 1) : 0u; };
  const Groups groups{reciprocal(p.k_group), reciprocal(p.q_group), p.heads / p.k_group, p.heads / p.q_group};
  GDN_LAUNCH((chunks<T, M>), grid, 32 * kWarps, kBytes, stream, p, plan, groups);
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
