// Decode of one token a sequence on sm_90: the state passes through the chip once, and everything here is
// about keeping its reads under way. decode.cu says what is computed, and serves what this file does not.
//
// A tile is some KB of one state head, contiguous in memory, and belongs to one warp, which has no other work: it asks for
// its tile and for all else that it needs, waits once, computes, and stores. The hardware deals out the warps, those that
// wait hide one another's latency, and with one warp a CTA a place is free again as soon as its warp has ended.
//
// Measured on an H200, in us, for 256 sequences with 16/64 heads (1 GiB of float32 states read and written, half as much
// of bfloat16; L2 flushed):                      float32    bfloat16
//   a warp a tile of 4 KB                            538         275
//   the same, four warps a CTA                       549         283
//   tiles of 2 KB                                    554         310
//   reads evicted first from L2                      554         285      (with writes too: 557 and 289)
// Tried as well, and taken out again: a warp works on a run of tiles, computes a head's gates and norms once, and has the
// next tiles under way. All with reads evicted first, in a run that gave a warp a tile of 4 KB 549 and 283, and
// decode.cu 562 and 301:
//   the next tile in registers                586 to 605  300 to 308
//   a ring in shared memory that the copy engine fills, and registers store
//                                             585 to 607  300 to 320
//   the same, stored by the copy engine       575 to 618  298 to 327
// Only calls of 8 MB of state preferred a ring: 10.8 to 10.9 us, for 11.4 to 11.8 here.
//
// The arithmetic and its order are decode.cu's to the bit: a row's bits depend on nothing but the row's inputs.
#include "sm90_decode.h"

#if defined(GDN_EMULATE)
#define GDN_DECODE_SM90 1
#elif defined(__CUDA_ARCH_LIST__)
// One architecture a library (build.py). Later ones could run this; registers are budgeted, and times known, for this one.
#define GDN_DECODE_SM90 (__CUDA_ARCH_LIST__ == 900)
#endif

#if GDN_DECODE_SM90
#include "../common/device.h"
#include "../common/primitives.cuh"
#include "../common/rows.cuh"
#include "sm90_heuristics.h"
#include "sm90_stream.cuh"

namespace gdn {
namespace {

constexpr int kSumLanes = 8;  // that decode.cu adds up a row with
constexpr int kMaxThreads = 128;
constexpr int kMaxGrid = 65535;  // of dimensions y and z

struct Work {
  int32_t part_shift;         // a head has 1 << part_shift tiles
  uint64_t group_reciprocal;  // ceil(2^32 / group)
  bool streaming;             // stores
};

// --- a tile ------------------------------------------------------------------------------------------------------------------

// ROWS rows of K columns, read and written in passes of one instruction, 16 bytes a lane. Narrow: eight lanes a row, which is
// how decode.cu adds up a row, so an instruction takes four rows by 128 bytes. Wide: as many lanes as a row has pieces of 16
// bytes, so an instruction takes 512 contiguous bytes, and a lane needs less of k and q; the sums take more shuffles.
template <class State, int K, int ROWS, bool WIDE>
struct Tile {
  static constexpr int size = 16 / sizeof(State);            // elements of a piece
  static constexpr int lanes = WIDE ? K / size : kSumLanes;  // that share a row
  static constexpr int segments = lanes / kSumLanes;
  static constexpr int elements = K / lanes;  // of a lane's share of a row: columns (piece * lanes + lane) * size on
  static constexpr int pieces = elements / size;
  static constexpr int rows_a_pass = 32 / lanes;
  static constexpr int passes = ROWS > rows_a_pass ? ROWS / rows_a_pass : 1;
  static constexpr int rows = passes * rows_a_pass;
  static constexpr int together = !WIDE ? 1 : size == 4 && passes >= 4 ? 4 : 2;  // passes worked on at a time
  static_assert(lanes <= 32 && rows <= 32 && passes <= lanes, "v and the outputs are an element a lane");

  // Where the lane's piece of its row of a pass lies.
  static __device__ __forceinline__ int place(int pass, int piece, int lane) {
    return (pass * rows_a_pass + lane / lanes) * K * int(sizeof(State)) + (piece * lanes + lane % lanes) * 16;
  }
  // A lane's part of the dot products of N rows, which sum_of_row then adds up: as in decode.cu, the part of lane l of eight
  // is a chain of fmaf through the columns of lanes l, l + 8, ..., so in a wide tile it is handed from segment to segment.
  template <int N>
  static __device__ __forceinline__ void dot(float (&sum)[N], const float (&x)[N][elements], const float (&y)[elements], int lane) {
#pragma unroll
    for (int n = 0; n < N; n++) sum[n] = 0.f;
#pragma unroll
    for (int i = 0; i < pieces; i++)
#pragma unroll
      for (int segment = 0; segment < segments; segment++)
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
          for (int j = i * size; j < (i + 1) * size; j++) sum[n] = fmaf(x[n][j], y[j], sum[n]);
          if (segments > 1) {
            const int source = lane / lanes * lanes + segment * kSumLanes + lane % kSumLanes;
            sum[n] = __shfl_sync(0xffffffffu, sum[n], source);
          }
        }
  }
};

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int offset = kSumLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// 16 bytes of a row.
template <class State>
__device__ __forceinline__ void unpack(const uint4& x, float* y) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(State) == 4) {
      y[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = Pair<State>::unpack(words[i]);
      y[2 * i] = pair.x, y[2 * i + 1] = pair.y;
    }
  }
}
template <class State>
__device__ __forceinline__ uint4 pack(const float* y) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(State) == 4)
      words[i] = __float_as_uint(y[i]);
    else
      words[i] = Pair<State>::pack(y[2 * i], y[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void pin(uint4& x) { asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)::"memory"); }

__device__ __forceinline__ uint16_t to_bits(float x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}
__device__ __forceinline__ float from_bits(uint16_t x, bool bf16) {
  return bf16 ? __uint_as_float(uint32_t(x) << 16) : __half2float(__ushort_as_half(x));
}

// --- what a tile needs beside its rows: all loads first, so that they wait together -------------------------------------------

// The pool rows of a sequence: rows.cuh's decode_rows, in as few round trips as there are.
struct Rows {
  uint32_t read_low, read_high, write_low, write_high;
  bool read_wide, write_wide;

  __device__ __forceinline__ int64_t read() const { return value(read_low, read_high, read_wide); }
  __device__ __forceinline__ int64_t write() const { return value(write_low, write_high, write_wide); }
  __device__ __forceinline__ bool live() const { return read() >= 0 && write() >= 0; }

 private:
  static __device__ __forceinline__ int64_t value(uint32_t low, uint32_t high, bool wide) {
    return wide ? int64_t(uint64_t(high) << 32 | low) : int64_t(int32_t(low));
  }
};

__device__ __forceinline__ const uint32_t* entry(const Index& index, int64_t i) {
  return static_cast<const uint32_t*>(index.data) + (index.wide ? 2 * i : i);
}

__device__ __forceinline__ Rows look_up(const DecodeParams& p, int b) {
  const uint32_t *read = nullptr, *write = nullptr;
  uint32_t otherwise = uint32_t(b);  // row b
  Rows rows;
  rows.read_wide = rows.write_wide = false;
  if (p.read_rows.data != nullptr) {
    read = entry(p.read_rows, b), write = entry(p.write_rows, b);
    rows.read_wide = p.read_rows.wide, rows.write_wide = p.write_rows.wide;
  } else if (p.pages.indices.data != nullptr) {
    const uint32_t *first_at = entry(p.pages.indptr, b), *end_at = entry(p.pages.indptr, int64_t(b) + 1);
    const uint32_t* last_at = entry(p.pages.last_len, b);
    const uint32_t first_low = first_at[0], end_low = end_at[0], last_low = last_at[0];
    uint32_t first_high = 0, end_high = 0, last_high = 0;
    if (p.pages.indptr.wide) first_high = first_at[1], end_high = end_at[1];
    if (p.pages.last_len.wide) last_high = last_at[1];
    const bool opens = last_low == 1 && last_high == 0;
    const auto first = int64_t(uint64_t(first_high) << 32 | first_low), end = int64_t(uint64_t(end_high) << 32 | end_low);
    if (end - 1 - opens >= first) {
      read = entry(p.pages.indices, end - 1 - opens), write = entry(p.pages.indices, end - 1);
      rows.read_wide = rows.write_wide = p.pages.indices.wide;
    } else {  // one token only: nothing to decode from
      otherwise = 0xffffffffu;
    }
  }
  rows.read_low = rows.write_low = otherwise;
  rows.read_high = rows.write_high = 0;
  if (read != nullptr) rows.read_low = read[0], rows.write_low = write[0];
  if (rows.read_wide) rows.read_high = read[1];
  if (rows.write_wide) rows.write_high = write[1];
  return rows;
}

// What all rows of a state head share, as it comes from memory.
template <class T>
struct Token {
  uint32_t k[T::elements / 2], q[T::elements / 2];
  Bits a, b, A_log, dt_bias;

  __device__ __forceinline__ void load(const DecodeParams& p, const Work& w, int64_t seq, int h, int lane) {
    const auto qh = int64_t(uint64_t(h) * w.group_reciprocal >> 32);  // h / group
    load_head(k, static_cast<const uint16_t*>(p.k) + seq * p.k_stride.batch + qh * p.k_stride.head, lane);
    load_head(q, static_cast<const uint16_t*>(p.q) + seq * p.q_stride.batch + qh * p.q_stride.head, lane);
    a = load_bits(p.a, seq * p.a_stride.batch + h * p.a_stride.head, p.a_dtype);
    b = load_bits(p.b, seq * p.b_stride.batch + h * p.b_stride.head, p.b_dtype);
    A_log = load_bits(p.A_log, h, p.A_log_dtype);
    dt_bias = load_bits(p.dt_bias, h, p.dt_bias_dtype);
  }

 private:
  static __device__ __forceinline__ void load_head(uint32_t (&x)[T::elements / 2], const uint16_t* head, int lane) {
#pragma unroll
    for (int i = 0; i < T::pieces; i++) {
      const uint16_t* from = head + (i * T::lanes + lane % T::lanes) * T::size;
      if constexpr (T::size == 8) {
        const uint4 y = *reinterpret_cast<const uint4*>(from);
        x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
      } else {
        const uint2 y = *reinterpret_cast<const uint2*>(from);
        x[2 * i] = y.x, x[2 * i + 1] = y.y;
      }
    }
  }
};

// The same, ready to be used.
template <class T>
struct Inputs {
  float k[T::elements], q[T::elements], alpha, beta;

  __device__ __forceinline__ Inputs(const Token<T>& token, const DecodeParams& p, int lane) {
    if (p.dtype == DType::bf16)
      unpack_head<__nv_bfloat16>(token);
    else
      unpack_head<__half>(token);
    const float A_log = to_float(token.A_log, p.A_log_dtype), dt_bias = to_float(token.dt_bias, p.dt_bias_dtype);
    alpha = expf(raw_gate(to_float(token.a, p.a_dtype), A_log, dt_bias));
    beta = sigmoid(to_float(token.b, p.b_dtype));
    if (p.l2norm) {
      normalise(k, lane);
      normalise(q, lane);
    }
  }

 private:
  template <class Input>
  __device__ __forceinline__ void unpack_head(const Token<T>& token) {
#pragma unroll
    for (int i = 0; i < T::elements / 2; i++) {
      const float2 y = Pair<Input>::unpack(token.k[i]), z = Pair<Input>::unpack(token.q[i]);
      k[2 * i] = y.x, k[2 * i + 1] = y.y, q[2 * i] = z.x, q[2 * i + 1] = z.y;
    }
  }
  static __device__ __forceinline__ void normalise(float (&x)[T::elements], int lane) {
    float sum[1], rows[1][T::elements];
#pragma unroll
    for (int i = 0; i < T::elements; i++) rows[0][i] = x[i];
    T::dot(sum, rows, x, lane);
    const float factor = norm_factor(sum_of_row(sum[0]));
#pragma unroll
    for (int i = 0; i < T::elements; i++) x[i] *= factor;
  }
};

// --- the kernel --------------------------------------------------------------------------------------------------------------

// CTAs of four warps a multiprocessor that registers are budgeted for: as many as do without spilling.
// Late: stores when all of a tile is computed, not as soon as its rows are.
template <class T, bool LATE>
constexpr int kResident = (T::passes * T::pieces > 8 ? 4 : T::segments == 4 ? 8 : T::segments == 2 ? 6 : 5) -
                          (LATE && T::size == 8 ? 2 : 0);

// Grid: x = tiles of a sequence, a warp each; y and z = sequence.
template <class State, int K, int ROWS, bool WIDE, bool CACHED, bool LATE>
__global__ void __launch_bounds__(kMaxThreads, (kResident<Tile<State, K, ROWS, WIDE>, LATE>))
    decode_tile(const __grid_constant__ DecodeParams p, const __grid_constant__ Work w) {
  using T = Tile<State, K, ROWS, WIDE>;
  constexpr int E = T::elements, N = T::together;
  const int lane = int(threadIdx.x % 32);
  const int b = int(blockIdx.z) * kMaxGrid + int(blockIdx.y);
  const int tile = int(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const int h = tile >> w.part_shift, row = (tile & ((1 << w.part_shift) - 1)) * T::rows;
  if (h >= p.heads || b >= p.batch) return;

  // All loads, in as few round trips as there are: the pool's rows, what the head shares, v (an element a lane), the tile.
  const Rows rows = look_up(p, b);
  Token<T> token;
  token.load(p, w, b, h, lane);
  const auto* v_at = static_cast<const uint16_t*>(p.v) + b * p.v_stride.batch + h * p.v_stride.head + row;
  const uint16_t v_of_tile = T::rows == 32 || lane < T::rows ? v_at[lane] : uint16_t(0);
  const bool live = rows.live();
  const int64_t offset = h * p.state.head + row * K;
  const auto* from = reinterpret_cast<const char*>(static_cast<const State*>(p.state.data) + rows.read() * p.state.row + offset);
  uint4 raw[T::passes][T::pieces];
#pragma unroll
  for (int r = 0; r < T::passes; r++)
#pragma unroll
    for (int i = 0; i < T::pieces; i++) raw[r][i] = load_tile<CACHED>(from + T::place(r, i, lane), live);

  const Inputs<T> inputs(token, p, lane);
  auto* to = reinterpret_cast<char*>(static_cast<State*>(p.state.data) + rows.write() * p.state.row + offset);
  auto* to_steps = reinterpret_cast<char*>(static_cast<State*>(p.steps.data) + b * p.steps.row + h * p.steps.head + row * K);
  const bool update = live && p.update_state, steps = live && p.steps.data != nullptr;
  float output = 0.f;  // of pass r: lane r of a row has it
#pragma unroll
  for (int first = 0; first < T::passes; first += N) {
    float s[N][E], u[N], o[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int i = 0; i < T::pieces; i++) unpack<State>(raw[first + n][i], &s[n][i * T::size]);
#pragma unroll
      for (int i = 0; i < E; i++) s[n][i] *= inputs.alpha;
    }
    T::dot(u, s, inputs.k, lane);
#pragma unroll
    for (int n = 0; n < N; n++) u[n] = sum_of_row(u[n]);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const auto v = uint16_t(__shfl_sync(0xffffffffu, uint32_t(v_of_tile), (first + n) * T::rows_a_pass + lane / T::lanes));
      u[n] = inputs.beta * (from_bits(v, p.dtype == DType::bf16) - u[n]);
#pragma unroll
      for (int i = 0; i < E; i++) s[n][i] = fmaf(u[n], inputs.k[i], s[n][i]);
#pragma unroll
      for (int i = 0; i < T::pieces; i++) {
        const uint4 piece = pack<State>(&s[n][i * T::size]);
        const int at = T::place(first + n, i, lane);
        if constexpr (LATE) {
          raw[first + n][i] = piece;
          pin(raw[first + n][i]);
        } else {
          if (steps) store_tile(to_steps + at, piece, w.streaming);
          if (update) store_tile(to + at, piece, w.streaming);
        }
      }
    }
    T::dot(o, s, inputs.q, lane);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float sum = p.scale * sum_of_row(o[n]);
      if (live && lane % T::lanes == first + n) output = sum;
    }
  }
  if constexpr (LATE) {
#pragma unroll
    for (int r = 0; r < T::passes; r++)
#pragma unroll
      for (int i = 0; i < T::pieces; i++) {
        if (steps) store_tile(to_steps + T::place(r, i, lane), raw[r][i], w.streaming);
        if (update) store_tile(to + T::place(r, i, lane), raw[r][i], w.streaming);
      }
  }
  auto* out = static_cast<uint16_t*>(p.output) + b * p.output_stride.batch + h * p.output_stride.head + row;
  if (lane % T::lanes < T::passes)
    out[lane % T::lanes * T::rows_a_pass + lane / T::lanes] = to_bits(output, p.dtype == DType::bf16);
}

// --- launches ----------------------------------------------------------------------------------------------------------------

struct Call {
  const DecodeParams& p;
  const DecodePlan& plan;
  bool streaming;
  cudaStream_t stream;

  template <class State, int K, int ROWS, bool WIDE, bool CACHED = false, bool LATE = false>
  bool launch() const {
    using T = Tile<State, K, ROWS, WIDE>;
    Work w{};
    while ((T::rows << w.part_shift) < p.head_size_v) w.part_shift++;
    w.group_reciprocal = ((uint64_t(1) << 32) + p.group - 1) / p.group;
    w.streaming = streaming;
    const unsigned x = unsigned(((p.heads << w.part_shift) + plan.warps - 1) / plan.warps);
    const unsigned y = unsigned(p.batch < kMaxGrid ? p.batch : kMaxGrid), z = unsigned((p.batch + kMaxGrid - 1) / kMaxGrid);
    GDN_LAUNCH((decode_tile<State, K, ROWS, WIDE, CACHED, LATE>), dim3(x, y, z), dim3(unsigned(plan.warps * 32)), 0, stream, p, w);
    return true;
  }

  template <class State>
  bool launch() const {
    constexpr int kRows = 1024 / (128 * sizeof(State));  // of 1 KB
    // Heads of 64 columns are served, not tuned for.
    if (p.head_size_k == 64) return launch<State, 64, 4 * kRows, false>();
    // Through L1 only wide tiles of 4 KB are compiled.
    if (plan.cached) return launch<State, 128, 4 * kRows, true, true, sizeof(State) == 4>();
    switch (plan.tile_bytes) {
      case 1024:
        return plan.wide ? launch<State, 128, kRows, true>() : launch<State, 128, kRows, false>();
      case 2048:
        return plan.wide ? launch<State, 128, 2 * kRows, true>() : launch<State, 128, 2 * kRows, false>();
      case 4096:
        return plan.wide ? launch<State, 128, 4 * kRows, true>() : launch<State, 128, 4 * kRows, false>();
      case 8192:
        return plan.wide ? launch<State, 128, 8 * kRows, true>() : launch<State, 128, 8 * kRows, false>();
    }
    return false;
  }
};

}  // namespace

bool launch_decode_sm90(const DecodeParams& p, int multiprocessors, cudaStream_t stream, int variant) {
  if (p.tokens != 1 || !p.qk_aligned || !p.state.aligned || p.state.v != p.head_size_k) return false;
  if (p.steps.data != nullptr && !(p.steps.aligned && p.steps.v == p.head_size_k)) return false;
  if (p.batch == 0) return true;
  if (p.heads > 0xffff) return false;  // h / group is exact below 2^16
  const int size = p.state.dtype == DType::f32 ? 4 : 2;
  if (variant == kDecodeByHeuristics) {
    const int64_t bytes = int64_t(p.batch) * p.heads * p.head_size_v * p.head_size_k * size;
    variant = decode_plan(bytes, size, multiprocessors);
  }
  const int number = variant % 100;
  if (number < 1 || number > kDecodePlanCount) return false;
  const DecodePlan& plan = kDecodePlans[number - 1];
  const Call call{p, plan, variant < 100 ? plan.streaming : variant >= 200, stream};
  const bool served = p.state.dtype == DType::f32    ? call.launch<float>()
                      : p.state.dtype == DType::bf16 ? call.launch<__nv_bfloat16>()
                                                     : call.launch<__half>();
  if (served) check(cudaGetLastError(), "decode");
  return served;
}

}  // namespace gdn

#else

namespace gdn {
bool launch_decode_sm90(const DecodeParams&, int, cudaStream_t, int) { return false; }
}  // namespace gdn

#endif
