// Pieces of what a consumer's warpgroup does with a chunk, for its 64 V rows of the state (sm90_recurrence.cu, sm90_pairs.cu). All products are
// transposed, V rows first.
#pragma once
#include "sm90_workspace.cuh"

#if GDN_SM90
#include "../common/sm90_primitives.cuh"

namespace gdn {
namespace sm90 {

// Shared memory of a chunk, where both kernels have it: tiles of k and q. In the recurrence the record follows.
constexpr int kKeysAt = 0, kQueriesAt = kTileBytes, kRecordAt = 2 * kTileBytes;

// A chunk's tiles of k and, if wanted, of q, from the caller's tensors to where Tiles finds them; by an elected lane. Maps are of boxes of 16 tokens.
template <bool kQueries>
__device__ __forceinline__ void copy_tiles(uint8_t* chunk, const TensorMap& k, const TensorMap& q, int head_k, int head_q, int token, uint64_t* full) {
#pragma unroll 1
  for (int row = 0; row < kChunk; row += 16) {
    uint8_t* to = chunk + reversed_row(row) * 128;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      tensor_copy(to + kKeysAt + half * (kTileBytes / 2), k, half * 64, head_k, token + row, full);
      if (kQueries) tensor_copy(to + kQueriesAt + half * (kTileBytes / 2), q, half * 64, head_q, token + row, full);
    }
  }
}

// Accumulators as left operands: tiles 2 k and 2 k + 1 are a [.., 16].
template <class M, int N>
__device__ __forceinline__ void to_operand(uint32_t (&a)[2 * N], const float (&x)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) a[2 * n] = Pair<M>::pack(x[n][0], x[n][1]), a[2 * n + 1] = Pair<M>::pack(x[n][2], x[n][3]);
}

// fp16 ends at 65504, and what passes through it here, S and Y and U, has no bound. So a V row is kept by a power of two below
// its true values where it would grow too large: the recurrence is linear in a row's V and state. `factor` is that of the two
// rows of this lane. bf16 has float32's range and needs none of this.
template <class M>
constexpr bool kBounded = std::is_same_v<M, __half>;

// Whether a value of 512 or more is among these of the warp: its exponent has its two upper bits set. (With Y below that, U
// stays in range: a row of the inverse adds up 64 values.)
template <int N>
__device__ __forceinline__ bool too_large(const uint32_t (&a)[N]) {
  uint32_t found[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < N; i += 2) found[0] = larger_halves(found[0], a[i]), found[1] = larger_halves(found[1], a[i + 1]);
  found[0] = larger_halves(found[0], found[1]);
  return __ballot_sync(0xffffffffu, (found[0] & found[0] << 1 & 0x40004000u) != 0) != 0;
}

// What to multiply rows with, so that their largest values come to lie below 64: 1 where they are small, or not finite.
template <int N>
__device__ __forceinline__ void shrink(float (&by)[2], const float (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(fabsf(x[n][2 * i]), fabsf(x[n][2 * i + 1])));
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const int exponent = int(__float_as_uint(largest) >> 23) - 127;
    by[i] = exponent >= 8 && exponent < 128 ? __uint_as_float(uint32_t(127 + 5 - exponent) << 23) : 1.f;
  }
}

template <int N>
__device__ __forceinline__ void multiply_rows(float (&x)[N][4], const float (&by)[2]) {
#pragma unroll
  for (int n = 0; n < N; n++) x[n][0] *= by[0], x[n][1] *= by[0], x[n][2] *= by[1], x[n][3] *= by[1];
}
__device__ __forceinline__ bool is_one(const float (&factor)[2]) { return factor[0] == 1.f && factor[1] == 1.f; }

// The state as a left operand; its rows shrink where it would not fit.
template <class M>
__device__ __forceinline__ void round_state(uint32_t (&operand)[32], float (&s)[16][4], float (&factor)[2]) {
  to_operand<M>(operand, s);
  if constexpr (kBounded<M>) {
    if (too_large(operand)) {
      float by[2];
      shrink(by, s);
      multiply_rows(s, by);
      factor[0] *= by[0], factor[1] *= by[1];
      to_operand<M>(operand, s);
    }
  }
}

// A consumer's own view of a stage: where the right operands are.
struct Tiles {
  const Description k_columns, q_columns, k_rows, coupling, scores;

  // The stage is the same for all lanes, which the compiler sees only so, and then keeps descriptions in uniform registers.
  __device__ __forceinline__ Tiles(const uint8_t* stages, int offset) : Tiles(stages, Uniform{__shfl_sync(0xffffffffu, offset, 0)}) {}
  // The same where the record lies elsewhere.
  __device__ __forceinline__ Tiles(const uint8_t* ring, int tiles, int record)
      : Tiles(ring, Uniform{__shfl_sync(0xffffffffu, tiles, 0)}, Uniform{__shfl_sync(0xffffffffu, record, 0)}) {}

 private:
  struct Uniform {
    int offset;
  };
  __device__ __forceinline__ Tiles(const uint8_t* stages, const Uniform& stage) : Tiles(stages, stage, Uniform{stage.offset + kRecordAt}) {}
  __device__ __forceinline__ Tiles(const uint8_t* ring, const Uniform& tiles, const Uniform& record)
      : k_columns(describe(ring + kKeysAt, Layout::swizzled, 16, 1024) + tiles.offset),
        q_columns(k_columns + (kQueriesAt - kKeysAt)),
        k_rows(describe(ring + kKeysAt, Layout::swizzled, 8192, 1024) + tiles.offset),
        coupling(describe(ring, Layout::plain, 128, 256) + record.offset),
        scores(coupling + kScoresAt) {}
};

// Products begin here and end where their results are wanted. X^T = S K^T. A warp issues these no faster than the tensor cores take them: between(k), of
// 8, is what else may be done meanwhile.
template <class M, class F>
__device__ __forceinline__ void begin_x(float (&x)[8][4], const uint32_t (&operand)[32], const Description& k_columns, F&& between) {
  multiply_fence();
#pragma unroll
  for (int k = 0; k < 8; k++) {
    multiply_k_major<M>(x, operand + 4 * k, k_columns + columns_at(k), k > 0);
    between(k);
  }
  multiply_commit();
}
// Half of S Q^T: the tensor cores have it to do while Z is made, and the other half while U becomes an operand.
template <class M>
__device__ __forceinline__ void begin_o(float (&o)[8][4], const uint32_t (&operand)[32], const Description& q_columns, int half) {
  multiply_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    multiply_k_major<M>(o, operand + 16 * half + 4 * k, q_columns + columns_at(4 * half + k), half > 0 || k > 0);
  multiply_commit();
}

// d^T += a triangle: of each strip of 16 sources, what its targets are. The longest product first, and this order is relied on: PTX promises an order of
// products with the same accumulators only where they have one shape or a fence lies between them, but a shorter one here begins with the columns with
// which the longer before it began, so it comes to each column no sooner than a product of that one's shape would. Fences make the assembler count each
// product by itself, and the wait for S would wait for scores (docs/performance_notes.md).
template <class M>
__device__ __forceinline__ void multiply_triangle(float (&d)[8][4], const uint32_t (&a)[16], const Description& triangle) {
  multiply_k_major<M, 8>(d, a + 12, triangle + strip_at(0), 1);
  multiply_k_major<M, 6>(d, a + 8, triangle + strip_at(1), 1);
  multiply_k_major<M, 4>(d, a + 4, triangle + strip_at(2), 1);
  multiply_k_major<M, 2>(d, a, triangle + strip_at(3), 1);
}

// Of the gates from `at` on, those of this lane's two tokens of tile n.
__device__ __forceinline__ float2 load_gate_pair(const float* gates, int at, int n, int lane) {
  return load_shared(reinterpret_cast<const float2*>(gates + at + 2 * (lane % 4)) + 4 * reversed_tile(n));
}
// One array of a chunk's gates.
__device__ __forceinline__ void load_gates(float2 (&to)[8], const float* gates, GateArray array, int lane) {
#pragma unroll
  for (int n = 0; n < 8; n++) to[n] = load_gate_pair(gates, array * kChunk, n, lane);
}

// One chunk of one warpgroup, from X to S, with O on its way. `operand` is the state rounded to M, `gamma` is the chunk's, where beta is at the
// sources. What comes from shared memory is loaded before products are issued: these go through the same queue, and it would wait behind them until
// the tensor cores take them. meanwhile() is called while the new state is under way.
template <class T, class M, bool kOutput, class F>
__device__ __forceinline__ void advance(float (&s)[16][4], float (&x)[8][4], float (&o)[8][4], const uint32_t (&v)[16], const float2 (&gamma)[8],
                                        uint32_t (&operand)[32], float (&factor)[2], const float* gates, const Tiles& tiles, int lane, F&& meanwhile) {
  // Z^T = V^T - gamma X^T; or Y^T, beta times that
  if constexpr (kOutput) begin_o<M>(o, operand, tiles.q_columns, 0);
  uint32_t z[16];  // as to_operand has it
  const auto make_z = [&](float above, float below) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
      float2 beta = make_float2(1.f, 1.f), by_x = gamma[n];
      if constexpr (!kBetaAtSources<M>) {
        beta = load_gate_pair(gates, kBetaAt, n, lane);
        by_x = load_gate_pair(gates, kGamma * kChunk, n, lane);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 value = Pair<T>::unpack(v[2 * n + i]);
        const float by = i == 0 ? above : below;
        x[n][2 * i] = beta.x * (value.x * by) - by_x.x * x[n][2 * i];
        x[n][2 * i + 1] = beta.y * (value.y * by) - by_x.y * x[n][2 * i + 1];
        z[2 * n + i] = Pair<M>::pack(x[n][2 * i], x[n][2 * i + 1]);
      }
    }
  };
  if constexpr (kBounded<M>) {
    if (__ballot_sync(0xffffffffu, is_one(factor)) == 0xffffffffu)
      make_z(1.f, 1.f);
    else
      make_z(factor[0], factor[1]);
    if (too_large(z)) {
      // The rows' state shrinks, and of S Q^T what there is already; the rest of it from a smaller state too.
      multiply_wait<0>();
      if constexpr (kOutput) pin(o);
      float by[2];
      shrink(by, x);
      multiply_rows(x, by);
      multiply_rows(s, by);
      if constexpr (kOutput) multiply_rows(o, by);
      factor[0] *= by[0], factor[1] *= by[1];
      to_operand<M>(z, x);
      to_operand<M>(operand, s);
    }
  } else {
    make_z(1.f, 1.f);
  }

  const float decay = load_shared(gates + kDecayAt);
  float2 tail[8], scale[8];
  load_gates(tail, gates, kTail, lane);

  // U^T = Z^T + Z^T coupling^T, the identity's part in float32
  multiply_fence();
  multiply_triangle<M>(x, z, tiles.coupling);
  multiply_commit();
  if constexpr (kOutput) begin_o<M>(o, operand, tiles.q_columns, 1);
  // Meanwhile the decay of S.
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] *= decay;
  pin(s);
  multiply_wait<kOutput ? 1 : 0>();
  pin(x);

  // S = gamma_64 S + (beta tail U^T) K
  uint32_t tail_u[16];
#pragma unroll
  for (int n = 0; n < 8; n++) {
    tail_u[2 * n] = Pair<M>::pack(tail[n].x * x[n][0], tail[n].y * x[n][1]);
    tail_u[2 * n + 1] = Pair<M>::pack(tail[n].x * x[n][2], tail[n].y * x[n][3]);
  }
  if constexpr (kOutput) load_gates(scale, gates, kScaleGamma, lane);
  multiply_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) multiply_n_major<M>(s, tail_u + 4 * k, tiles.k_rows + k * 2048, 1);
  multiply_commit();

  // O^T = scale gamma (S Q^T) + U^T scores^T, while S is under way
  if constexpr (kOutput) {
    uint32_t u[16];
    to_operand<M>(u, x);
    multiply_wait<1>();
    pin(o);
#pragma unroll
    for (int n = 0; n < 8; n++) o[n][0] *= scale[n].x, o[n][1] *= scale[n].y, o[n][2] *= scale[n].x, o[n][3] *= scale[n].y;
    meanwhile();
    multiply_fence();
    multiply_triangle<M>(o, u, tiles.scores);
    multiply_commit();
  }
  multiply_wait<kOutput ? 1 : 0>();
  pin(s);
}

}  // namespace sm90
}  // namespace gdn
#endif
