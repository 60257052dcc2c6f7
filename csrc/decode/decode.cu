// Decode: T tokens a sequence, T = 1 as a rule, at the speed of memory.
//
// A state head [V, K] is read once and written once, and that is nearly all the time there is, so the kernel is laid
// out around its loads. The V rows of a state are independent (row i needs S[i,:], v[i], and what all rows share: k, q,
// the gates), so they may be dealt out to threads and CTAs at will:
//   - eight lanes own a row, K/8 elements each, in pieces of 16 bytes: a warp's load instruction takes four whole
//     128-byte lines, and a dot product along the row is three shuffles;
//   - a CTA of 16 such groups owns 16 * R rows. All R rows of a thread are asked for before the first is used: with
//     R = 4 a CTA has 32 KB of a float32 state in flight. R shrinks when there are few heads, so that the card fills;
//   - nothing is exchanged between groups, so there is no shared memory and no barrier. k, q and the gates are read by
//     every group (they come from L1 and L2) and normalised by it, in the same order everywhere: the bits of a row
//     depend neither on R nor on the batch.
// With T > 1 the rows stay in float32 registers between tokens, and the next token's inputs are fetched while this one
// is worked on. Sums use explicit fmaf, so that no instance of the template contracts them differently.
#include "../common/device.h"
#include "../common/primitives.cuh"
#include "../common/rows.cuh"
#include "sm90_decode.h"

namespace gdn {
namespace {

constexpr int kLanes = 8;    // lanes that share a row
constexpr int kThreads = 128;
constexpr int kGroups = kThreads / kLanes;

// --- a piece: 16 bytes of a state row ------------------------------------------------------------------------------

template <class State>
struct Piece;

template <>
struct Piece<float> {
  static constexpr int size = 4;
  static __device__ __forceinline__ void unpack(const uint4& x, float* y) {
    y[0] = __uint_as_float(x.x), y[1] = __uint_as_float(x.y), y[2] = __uint_as_float(x.z), y[3] = __uint_as_float(x.w);
  }
  static __device__ __forceinline__ uint4 pack(const float* y) {
    return make_uint4(__float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]), __float_as_uint(y[3]));
  }
};

template <class State>
struct Piece16 {
  static constexpr int size = 8;
  static __device__ __forceinline__ void unpack(const uint4& x, float* y) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = Pair<State>::unpack(words[i]);
      y[2 * i] = pair.x, y[2 * i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float* y) {
    return make_uint4(Pair<State>::pack(y[0], y[1]), Pair<State>::pack(y[2], y[3]), Pair<State>::pack(y[4], y[5]),
                      Pair<State>::pack(y[6], y[7]));
  }
};
template <>
struct Piece<__nv_bfloat16> : Piece16<__nv_bfloat16> {};
template <>
struct Piece<__half> : Piece16<__half> {};

// The K/8 elements of a lane, element i being column (i / S) * 8 S + lane * S + i % S, with S elements a piece.
template <class State, int K>
struct Row {
  static constexpr int size = Piece<State>::size;
  static constexpr int elements = K / kLanes;
  static constexpr int pieces = elements / size;
  static __device__ __forceinline__ int column(int piece, int lane) { return (piece * kLanes + lane) * size; }
};

template <class State, int K, int R, bool ALIGNED>
__device__ __forceinline__ void load_rows(float (&s)[R][K / kLanes], const State* base, int64_t stride, int lane) {
  using L = Row<State, K>;
  if constexpr (ALIGNED) {
    uint4 raw[R][L::pieces];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < L::pieces; i++) raw[r][i] = load_stream(base + r * stride + L::column(i, lane));
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < L::pieces; i++) Piece<State>::unpack(raw[r][i], &s[r][i * L::size]);
  } else {  // a pool whose rows are padded to an odd number of elements
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < L::pieces; i++)
#pragma unroll
        for (int j = 0; j < L::size; j++) s[r][i * L::size + j] = float(base[r * stride + L::column(i, lane) + j]);
  }
}

template <class State, int K, int R, bool ALIGNED>
__device__ __forceinline__ void store_rows(const float (&s)[R][K / kLanes], State* base, int64_t stride, int lane) {
  using L = Row<State, K>;
  if constexpr (ALIGNED) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < L::pieces; i++)
        store_stream(base + r * stride + L::column(i, lane), Piece<State>::pack(&s[r][i * L::size]));
  } else {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < L::pieces; i++)
#pragma unroll
        for (int j = 0; j < L::size; j++) base[r * stride + L::column(i, lane) + j] = State(s[r][i * L::size + j]);
  }
}

// --- q, k, v and the gates of one token, as they come from memory -------------------------------------------------

template <int K, int S, int R>
struct Token {
  uint32_t k[K / kLanes / 2], q[K / kLanes / 2];
  uint16_t v[R];
  Bits a, b;
};

// One lane's share of a head of q or k (16-bit), in the same columns as its share of a state row.
template <int K, int S, bool ALIGNED>
__device__ __forceinline__ void load_head(uint32_t (&x)[K / kLanes / 2], const uint16_t* base, int lane) {
#pragma unroll
  for (int i = 0; i < K / kLanes / S; i++) {
    const uint16_t* from = base + (i * kLanes + lane) * S;
    uint32_t* to = &x[i * S / 2];
    if constexpr (ALIGNED && S == 8) {
      const uint4 y = *reinterpret_cast<const uint4*>(from);
      to[0] = y.x, to[1] = y.y, to[2] = y.z, to[3] = y.w;
    } else if constexpr (ALIGNED) {
      const uint2 y = *reinterpret_cast<const uint2*>(from);
      to[0] = y.x, to[1] = y.y;
    } else {
#pragma unroll
      for (int j = 0; j < S / 2; j++) to[j] = uint32_t(from[2 * j]) | uint32_t(from[2 * j + 1]) << 16;
    }
  }
}

template <bool ALIGNED, int K, int S, int R>
__device__ __forceinline__ void load_token(Token<K, S, R>& x, const DecodeParams& p, int64_t b, int64_t t, int h, int row, int lane) {
  const int qh = h / p.group;
  const auto* q = static_cast<const uint16_t*>(p.q) + b * p.q_stride.batch + t * p.q_stride.token + qh * p.q_stride.head;
  const auto* k = static_cast<const uint16_t*>(p.k) + b * p.k_stride.batch + t * p.k_stride.token + qh * p.k_stride.head;
  const auto* v = static_cast<const uint16_t*>(p.v) + b * p.v_stride.batch + t * p.v_stride.token + h * p.v_stride.head;
  load_head<K, S, ALIGNED>(x.k, k, lane);
  load_head<K, S, ALIGNED>(x.q, q, lane);
#pragma unroll
  for (int r = 0; r < R; r++) x.v[r] = v[row + r * kGroups];
  x.a = load_bits(p.a, b * p.a_stride.batch + t * p.a_stride.token + h * p.a_stride.head, p.a_dtype);
  x.b = load_bits(p.b, b * p.b_stride.batch + t * p.b_stride.token + h * p.b_stride.head, p.b_dtype);
}

__device__ __forceinline__ float sum_of_group(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

template <int N>
__device__ __forceinline__ void unpack_head(float (&y)[N], const uint32_t (&x)[N / 2], bool bf16) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const float2 pair = bf16 ? Pair<__nv_bfloat16>::unpack(x[i]) : Pair<__half>::unpack(x[i]);
    y[2 * i] = pair.x, y[2 * i + 1] = pair.y;
  }
}

template <int N>
__device__ __forceinline__ void normalise(float (&x)[N]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) sum = fmaf(x[i], x[i], sum);
  const float factor = norm_factor(sum_of_group(sum));
#pragma unroll
  for (int i = 0; i < N; i++) x[i] *= factor;
}

__device__ __forceinline__ uint16_t to_bits(float x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}
__device__ __forceinline__ float from_bits(uint16_t x, bool bf16) {
  return bf16 ? __uint_as_float(uint32_t(x) << 16) : __half2float(__ushort_as_half(x));
}

// --- the kernel ----------------------------------------------------------------------------------------------------

// CTAs a multiprocessor that registers are budgeted for: four rows of 128 float32 take more than a quarter allows.
template <class State, int K, int R>
constexpr int kResident = R * K * sizeof(State) > 1024 ? 3 : 4;

// Grid: x = state head and share of its V rows, y = sequence.
template <class State, int K, int R, bool MULTI, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, kResident<State, K, R>) decode(const __grid_constant__ DecodeParams p) {
  constexpr int E = K / kLanes, S = Piece<State>::size;
  const int shares = p.head_size_v / (kGroups * R);
  const int h = blockIdx.x / shares, share = blockIdx.x % shares;
  const int64_t b = int64_t(p.batch_begin) + blockIdx.y;
  const int lane = threadIdx.x % kLanes;
  const int row = share * (kGroups * R) + threadIdx.x / kLanes;  // then every 16th
  const bool bf16 = p.dtype == DType::bf16;

  Token<K, S, R> next;
  load_token<ALIGNED>(next, p, b, 0, h, row, lane);
  const Bits A_log_bits = load_bits(p.A_log, h, p.A_log_dtype), dt_bias_bits = load_bits(p.dt_bias, h, p.dt_bias_dtype);

  DecodeRows rows{b, b};
  if (p.read_rows.data != nullptr) {
    rows.read = load_index(p.read_rows, b);
    rows.write = load_index(p.write_rows, b);
  } else if (p.pages.indices.data != nullptr) {
    rows = decode_rows(p.pages, b);
  }
  auto* out = static_cast<uint16_t*>(p.output) + b * p.output_stride.batch + h * p.output_stride.head + row;
  if (rows.read < 0 || rows.write < 0) {  // padding: zeros out, no row touched
    if (lane == 0)
      for (int t = 0; t < p.tokens; t++)
#pragma unroll
        for (int r = 0; r < R; r++) out[t * p.output_stride.token + r * kGroups] = 0;
    return;
  }

  float s[R][E];
  const int64_t offset = h * p.state.head + row * p.state.v, stride = kGroups * p.state.v;
  load_rows<State, K, R, ALIGNED>(s, static_cast<const State*>(p.state.data) + rows.read * p.state.row + offset, stride, lane);

  const float A_log = to_float(A_log_bits, p.A_log_dtype), dt_bias = to_float(dt_bias_bits, p.dt_bias_dtype);
  const int tokens = MULTI ? p.tokens : 1;
  for (int t = 0; t < tokens; t++) {
    float k[E], q[E], v[R];
    unpack_head<E>(k, next.k, bf16);
    unpack_head<E>(q, next.q, bf16);
#pragma unroll
    for (int r = 0; r < R; r++) v[r] = from_bits(next.v[r], bf16);
    const float alpha = expf(raw_gate(to_float(next.a, p.a_dtype), A_log, dt_bias)), beta = sigmoid(to_float(next.b, p.b_dtype));
    if (MULTI && t + 1 < tokens) load_token<ALIGNED>(next, p, b, t + 1, h, row, lane);
    if (p.l2norm) {
      normalise(k);
      normalise(q);
    }

    float u[R], o[R];
#pragma unroll
    for (int r = 0; r < R; r++) {  // S k, of the decayed state
      u[r] = 0.f;
#pragma unroll
      for (int i = 0; i < E; i++) {
        s[r][i] *= alpha;
        u[r] = fmaf(s[r][i], k[i], u[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) u[r] = beta * (v[r] - sum_of_group(u[r]));
#pragma unroll
    for (int r = 0; r < R; r++) {
      o[r] = 0.f;
#pragma unroll
      for (int i = 0; i < E; i++) {
        s[r][i] = fmaf(u[r], k[i], s[r][i]);
        o[r] = fmaf(s[r][i], q[i], o[r]);
      }
    }
    if (MULTI && p.steps.data != nullptr) {
      State* steps = static_cast<State*>(p.steps.data) + b * p.steps.row + t * p.steps_token + h * p.steps.head;
      store_rows<State, K, R, ALIGNED>(s, steps + row * p.steps.v, kGroups * p.steps.v, lane);
    }
    if (t == tokens - 1 && p.update_state)
      store_rows<State, K, R, ALIGNED>(s, static_cast<State*>(p.state.data) + rows.write * p.state.row + offset, stride, lane);
#pragma unroll
    for (int r = 0; r < R; r++) o[r] = p.scale * sum_of_group(o[r]);
    if (lane == 0)
#pragma unroll
      for (int r = 0; r < R; r++) out[t * p.output_stride.token + r * kGroups] = to_bits(o[r], bf16);
  }
}

template <class State, int K, int R, bool MULTI, bool ALIGNED = true>
void launch(DecodeParams p, cudaStream_t stream) {
  const int shares = p.head_size_v / (kGroups * R);
  constexpr int kMaxGridY = 65535;
  for (p.batch_begin = 0; p.batch_begin < p.batch; p.batch_begin += kMaxGridY) {
    const int count = p.batch - p.batch_begin < kMaxGridY ? p.batch - p.batch_begin : kMaxGridY;
    GDN_LAUNCH((decode<State, K, R, MULTI, ALIGNED>), dim3(p.heads * shares, count), kThreads, 0, stream, p);
  }
  check(cudaGetLastError(), "decode");
}

template <class State, int K>
void launch(const DecodeParams& p, cudaStream_t stream) {
  // Rows a thread: as many as leave at least four CTAs for every multiprocessor.
  const int64_t groups = int64_t(p.batch) * p.heads * (p.head_size_v / kGroups);  // CTAs with one row a thread
  const int64_t wanted = 4 * int64_t(multiprocessors());
  const int rows = groups >= 4 * wanted ? 4 : groups >= 2 * wanted ? 2 : 1;
  const bool aligned = p.qk_aligned && p.state.aligned && (p.steps.data == nullptr || p.steps.aligned);
  if (!aligned) {  // rows or heads that start anywhere: right, not fast
    launch<State, K, 1, true, false>(p, stream);
  } else if (p.tokens > 1 || p.steps.data != nullptr) {  // more is kept a row, so fewer rows
    rows > 1 ? launch<State, K, 2, true>(p, stream) : launch<State, K, 1, true>(p, stream);
  } else {
    rows == 4   ? launch<State, K, 4, false>(p, stream)
    : rows == 2 ? launch<State, K, 2, false>(p, stream)
                : launch<State, K, 1, false>(p, stream);
  }
}

template <class State>
void launch(const DecodeParams& p, cudaStream_t stream) {
  p.head_size_k == 128 ? launch<State, 128>(p, stream) : launch<State, 64>(p, stream);
}

}  // namespace

void launch_decode(const DecodeParams& p, cudaStream_t stream) {
  if (p.batch == 0) return;
  if (launch_decode_sm90(p, multiprocessors(), stream, kDecodeByHeuristics)) return;
  switch (p.state.dtype) {
    case DType::f32:
      return launch<float>(p, stream);
    case DType::bf16:
      return launch<__nv_bfloat16>(p, stream);
    default:
      return launch<__half>(p, stream);
  }
}

}  // namespace gdn
