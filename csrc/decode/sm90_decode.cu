// Decode of one token a sequence on sm_90: the state passes through the chip once, and everything here is
// about keeping its reads under way. decode.cu says what is computed, and serves what this file does not.
//
// A tile is 4 R rows of one state head, contiguous in memory, and belongs to one warp: eight lanes a row, so that an
// instruction takes four rows by 128 bytes, from memory or from shared memory without conflicts. Warps never meet. Tiles
// are numbered through parts of a head, heads and sequences; a warp works on a run of them and computes a head's gates
// and norms once. Three ways to have reads under way (sm90_heuristics.h says which is taken):
//   ring        the copy engine fills a ring of tiles in shared memory, some tiles ahead. A tile is stored from
//               registers, its place refilled as soon as it has been read; or (BULK) put back and stored by the copy engine.
//   registers   the next tile's loads are issued before the present one is worked on.
//   single      a warp has one tile, and the hardware deals out the warps: the shortest way from launch to end.
// The arithmetic and its order are decode.cu's to the bit: a row's bits depend on nothing but the row's inputs.
#include "sm90_decode.h"

#if defined(GDN_EMULATE)
#define GDN_DECODE_SM90 1
#elif defined(__CUDA_ARCH_LIST__)
// One architecture a library (build.py). Later ones could run this; registers are budgeted, and times known, for this one.
#define GDN_DECODE_SM90 (__CUDA_ARCH_LIST__ == 900)
#endif

#if GDN_DECODE_SM90
#include <algorithm>

#include "../common/device.h"
#include "../common/primitives.cuh"
#include "../common/rows.cuh"
#include "sm90_heuristics.h"
#include "sm90_stream.cuh"

namespace gdn {
namespace {

constexpr int kLanes = 8;     // that share a row
constexpr int kRowsAPass = 4;  // of a warp
constexpr int kMaxRingThreads = 512;
constexpr int kMaxThreads = 128;  // of a CTA without a ring

struct Work {
  int32_t tiles, each, extra;  // the first `extra` warps work on each + 1 tiles, the others on `each`
  int32_t part_shift;          // a head has 1 << part_shift tiles
  int32_t stages;
  uint64_t group_reciprocal;  // ceil(2^32 / group)
  bool read_first, written_first;  // to be evicted from L2
};

// --- pieces of a row: 16 bytes ---------------------------------------------------------------------------------------------

template <class State, int K, int R>
struct Tile {
  static constexpr int size = 16 / sizeof(State);  // elements of a piece
  static constexpr int elements = K / kLanes;      // of a lane's share of a row: columns (piece * kLanes + lane) * size on
  static constexpr int pieces = elements / size;
  static constexpr int rows = kRowsAPass * R;
  static constexpr int row_bytes = K * sizeof(State);
  static constexpr int bytes = rows * row_bytes;
  static_assert(bytes % 16 == 0, "what the copy engine takes");
  // Where the lane's piece of its row of a pass lies in a tile: row 4 pass + lane / 8.
  static __device__ __forceinline__ int place(int pass, int piece, int lane) {
    return (pass * kRowsAPass + lane / kLanes) * row_bytes + (piece * kLanes + lane % kLanes) * 16;
  }
};

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

// What all rows of a state head share, as it comes from memory. S: elements of a piece.
template <int K, int S>
struct Token {
  uint32_t k[K / kLanes / 2], q[K / kLanes / 2];
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
  static __device__ __forceinline__ void load_head(uint32_t (&x)[K / kLanes / 2], const uint16_t* head, int lane) {
#pragma unroll
    for (int i = 0; i < K / kLanes / S; i++) {
      const uint16_t* from = head + (i * kLanes + lane % kLanes) * S;
      if constexpr (S == 8) {
        const uint4 y = *reinterpret_cast<const uint4*>(from);
        x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
      } else {
        const uint2 y = *reinterpret_cast<const uint2*>(from);
        x[2 * i] = y.x, x[2 * i + 1] = y.y;
      }
    }
  }
};

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The same, ready to be used.
template <int E>
struct Inputs {
  float k[E], q[E], alpha, beta;

  template <int K, int S>
  __device__ __forceinline__ void adopt(const Token<K, S>& token, const DecodeParams& p) {
    if (p.dtype == DType::bf16)
      unpack_head<__nv_bfloat16>(token);
    else
      unpack_head<__half>(token);
    const float A_log = to_float(token.A_log, p.A_log_dtype), dt_bias = to_float(token.dt_bias, p.dt_bias_dtype);
    alpha = expf(raw_gate(to_float(token.a, p.a_dtype), A_log, dt_bias));
    beta = sigmoid(to_float(token.b, p.b_dtype));
    if (p.l2norm) {
      normalise(k);
      normalise(q);
    }
  }

 private:
  template <class Input, int K, int S>
  __device__ __forceinline__ void unpack_head(const Token<K, S>& token) {
#pragma unroll
    for (int i = 0; i < E / 2; i++) {
      const float2 y = Pair<Input>::unpack(token.k[i]), z = Pair<Input>::unpack(token.q[i]);
      k[2 * i] = y.x, k[2 * i + 1] = y.y, q[2 * i] = z.x, q[2 * i + 1] = z.y;
    }
  }
  static __device__ __forceinline__ void normalise(float (&x)[E]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < E; i++) sum = fmaf(x[i], x[i], sum);
    const float factor = norm_factor(sum_of_row(sum));
#pragma unroll
    for (int i = 0; i < E; i++) x[i] *= factor;
  }
};

// --- tiles -------------------------------------------------------------------------------------------------------------------

// Where a warp is in its run.
struct Cursor {
  int part, h, b;

  __device__ __forceinline__ Cursor(const DecodeParams& p, const Work& w, uint32_t tile) {
    const uint32_t head = tile >> w.part_shift;
    part = int(tile & ((1u << w.part_shift) - 1));
    b = int(head / uint32_t(p.heads));
    h = int(head - uint32_t(b) * uint32_t(p.heads));
  }
  __device__ __forceinline__ Cursor(int part, int h, int b) : part(part), h(h), b(b) {}
  __device__ __forceinline__ void next_head(const DecodeParams& p) {
    part = 0;
    if (++h == p.heads) h = 0, b++;
  }
  __device__ __forceinline__ void next_tile(const DecodeParams& p, const Work& w) {
    if (++part >> w.part_shift) next_head(p);
  }
};

struct Run {
  int begin, count;

  // Warps are counted through the CTAs first, so that those with one tile more are not neighbours.
  __device__ __forceinline__ explicit Run(const Work& w) {
    const int g = int(threadIdx.x / 32 * gridDim.x + blockIdx.x);
    begin = g * w.each + (g < w.extra ? g : w.extra);
    count = w.each + (g < w.extra);
  }
};

template <class State, int K, int R>
struct Worker {
  using T = Tile<State, K, R>;

  const DecodeParams& p;
  const int lane;
  const uint64_t read_policy, write_policy;
  Inputs<T::elements> inputs;

  __device__ __forceinline__ Worker(const DecodeParams& p, const Work& w, int lane)
      : p(p), lane(lane), read_policy(l2_policy(w.read_first)), write_policy(l2_policy(w.written_first)) {}

  __device__ __forceinline__ char* tile(int64_t row, const Cursor& at) const {
    const int64_t offset = row * p.state.row + at.h * p.state.head + at.part * (T::rows * K);
    return static_cast<char*>(p.state.data) + offset * int64_t(sizeof(State));
  }
  __device__ __forceinline__ char* tile_of_steps(const Cursor& at) const {
    const int64_t offset = at.b * p.steps.row + at.h * p.steps.head + at.part * (T::rows * K);
    return static_cast<char*>(p.steps.data) + offset * int64_t(sizeof(State));
  }

  // A lane's element of v: row `lane` of the tile.
  __device__ __forceinline__ uint16_t load_v(const Cursor& at) const {
    const auto* v = static_cast<const uint16_t*>(p.v) + at.b * p.v_stride.batch + at.h * p.v_stride.head + at.part * T::rows;
    return T::rows == 32 || lane < T::rows ? v[lane] : uint16_t(0);
  }

  // The rows of a pass, from memory and to it.
  __device__ __forceinline__ void load(uint4 (&raw)[T::pieces], const char* tile, int pass, bool valid) const {
#pragma unroll
    for (int i = 0; i < T::pieces; i++) raw[i] = load_stream(tile + T::place(pass, i, lane), read_policy, valid);
  }
  __device__ __forceinline__ void store(const uint4 (&raw)[T::pieces], char* tile, int pass) const {
#pragma unroll
    for (int i = 0; i < T::pieces; i++) store_stream(tile + T::place(pass, i, lane), raw[i], write_policy);
  }

  // The row of a pass, one token on. Returns the lane's share of S q.
  __device__ __forceinline__ float step(uint4 (&raw)[T::pieces], uint16_t v_of_tile, int pass) const {
    constexpr int E = T::elements;
    const auto v = uint16_t(__shfl_sync(0xffffffffu, uint32_t(v_of_tile), pass * kRowsAPass + lane / kLanes));
    float s[E], u = 0.f, o = 0.f;
#pragma unroll
    for (int i = 0; i < T::pieces; i++) unpack<State>(raw[i], &s[i * T::size]);
#pragma unroll
    for (int i = 0; i < E; i++) {
      s[i] *= inputs.alpha;
      u = fmaf(s[i], inputs.k[i], u);
    }
    u = inputs.beta * (from_bits(v, p.dtype == DType::bf16) - sum_of_row(u));
#pragma unroll
    for (int i = 0; i < E; i++) {
      s[i] = fmaf(u, inputs.k[i], s[i]);
      o = fmaf(s[i], inputs.q[i], o);
    }
#pragma unroll
    for (int i = 0; i < T::pieces; i++) raw[i] = pack<State>(&s[i * T::size]);
    return o;
  }

  // Lane j of a row's eight writes the output of its row in pass j.
  __device__ __forceinline__ void store_output(const float (&o)[R], const Cursor& at, bool live) const {
    float mine = 0.f;
    if (live) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        const float sum = p.scale * sum_of_row(o[r]);
        if (lane % kLanes == r) mine = sum;
      }
    }
    auto* out = static_cast<uint16_t*>(p.output) + at.b * p.output_stride.batch + at.h * p.output_stride.head + at.part * T::rows;
    if (lane % kLanes < R) out[lane % kLanes * kRowsAPass + lane / kLanes] = to_bits(mine, p.dtype == DType::bf16);
  }
};

// --- kernels -----------------------------------------------------------------------------------------------------------------

// What the tiles of a ring need beside their rows: a barrier, and the pool row they are for (-1: padding).
struct Stage {
  uint64_t full;
  int64_t row;
};

template <class State, int K, int R, bool BULK>
__global__ void __launch_bounds__(kMaxRingThreads, 1) ring(const __grid_constant__ DecodeParams p, const __grid_constant__ Work w) {
  using T = Tile<State, K, R>;
  GDN_SHARED(shared);
  const int warps = int(blockDim.x / 32), warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
  const Run run(w);
  if (run.count == 0) return;
  uint8_t* tiles = shared + warp * w.stages * T::bytes;
  Stage* stages = reinterpret_cast<Stage*>(shared + warps * w.stages * T::bytes) + warp * w.stages;

  Worker<State, K, R> worker(p, w, lane);
  Cursor at(p, w, uint32_t(run.begin)), ahead = at;
  Rows rows = look_up(p, at.b);
  Token<K, T::size> token;
  token.load(p, w, at.b, at.h, lane);
  if (lane == 0)
    for (int s = 0; s < w.stages; s++) barrier_init(&stages[s].full, 1);
  barrier_init_done();
  __syncwarp();

  // Bring the tile at `ahead` into a stage.
  int fetched = 0;
  const auto fetch = [&](int stage) {
    if (lane == 0) {
      const bool live = rows.live();
      stages[stage].row = live ? rows.write() : -1;
      if (live) {
        barrier_arrive_expect(&stages[stage].full, T::bytes);
        bulk_load(tiles + stage * T::bytes, worker.tile(rows.read(), ahead), T::bytes, &stages[stage].full, worker.read_policy);
      } else {
        barrier_arrive(&stages[stage].full);
      }
    }
    const int b = ahead.b;
    ahead.next_tile(p, w);
    fetched++;
    if (ahead.b != b && fetched < run.count) rows = look_up(p, ahead.b);
  };
  while (fetched < w.stages && fetched < run.count) fetch(fetched);
  worker.inputs.adopt(token, p);

  int stage = 0, phase = 0;
  for (int i = 0; i < run.count; i++) {
    const uint16_t v = worker.load_v(at);
    if (i > 0 && at.part == 0) {
      token.load(p, w, at.b, at.h, lane);
      worker.inputs.adopt(token, p);
    }
    barrier_wait(&stages[stage].full, phase);
    const int64_t row = stages[stage].row;
    const bool live = row >= 0;
    uint8_t* here = tiles + stage * T::bytes;
    float o[R];
    if (live) {
      char *to = worker.tile(row, at), *to_steps = worker.tile_of_steps(at);
#pragma unroll
      for (int r = 0; r < R; r++) {
        uint4 raw[T::pieces];
#pragma unroll
        for (int j = 0; j < T::pieces; j++) raw[j] = *reinterpret_cast<const uint4*>(here + T::place(r, j, lane));
        o[r] = worker.step(raw, v, r);
        if (p.steps.data != nullptr) worker.store(raw, to_steps, r);
        if (BULK) {
#pragma unroll
          for (int j = 0; j < T::pieces; j++) *reinterpret_cast<uint4*>(here + T::place(r, j, lane)) = raw[j];
        } else if (p.update_state) {
          worker.store(raw, to, r);
        }
      }
      if (BULK) fence_async_proxy();
    }
    __syncwarp();  // all are through with the tile
    if (!BULK) {
      if (fetched < run.count) fetch(stage);
    } else {
      if (lane == 0) {
        if (live && p.update_state) bulk_store(worker.tile(row, at), here, T::bytes, worker.write_policy);
        bulk_commit();  // an empty group too: they are counted
      }
      if (i > 0 && fetched < run.count) {  // into the place of the tile before, which is on its way
        if (lane == 0) bulk_wait_read<1>();
        fetch(stage == 0 ? w.stages - 1 : stage - 1);
      }
    }
    worker.store_output(o, at, live);
    at.next_tile(p, w);
    if (++stage == w.stages) stage = 0, phase ^= 1;
  }
  if (BULK && lane == 0) bulk_wait_read<0>();
}

template <class State, int K, int R>
__global__ void __launch_bounds__(kMaxThreads, R * K * sizeof(State) > 512 ? 3 : 4)
    registers(const __grid_constant__ DecodeParams p, const __grid_constant__ Work w) {
  using T = Tile<State, K, R>;
  const int lane = int(threadIdx.x % 32);
  const Run run(w);
  if (run.count == 0) return;
  Worker<State, K, R> worker(p, w, lane);
  Cursor at(p, w, uint32_t(run.begin)), ahead = at;
  Rows rows = look_up(p, at.b);
  Token<K, T::size> token;
  token.load(p, w, at.b, at.h, lane);

  // Ask for the tile at `ahead`, if there is one. row_ahead: the pool row that it is for, -1: padding.
  int left = run.count;
  int64_t row_ahead = -1;
  const auto fetch = [&](uint4 (&raw)[R][T::pieces]) {
    if (left == 0) return;
    row_ahead = rows.live() ? rows.write() : -1;
    const char* from = worker.tile(rows.read(), ahead);
#pragma unroll
    for (int r = 0; r < R; r++) worker.load(raw[r], from, r, row_ahead >= 0);
    const int b = ahead.b;
    ahead.next_tile(p, w);
    if (--left > 0 && ahead.b != b) rows = look_up(p, ahead.b);
  };
  uint4 one[R][T::pieces], two[R][T::pieces];
  fetch(one);
  worker.inputs.adopt(token, p);

  int i = 0;
  const auto turn = [&](uint4 (&raw)[R][T::pieces], uint4 (&raw_ahead)[R][T::pieces]) {
    const int64_t row = row_ahead;
    const uint16_t v = worker.load_v(at);
    fetch(raw_ahead);
    if (i > 0 && at.part == 0) {
      token.load(p, w, at.b, at.h, lane);
      worker.inputs.adopt(token, p);
    }
    float o[R];
    if (row >= 0) {
      char *to = worker.tile(row, at), *to_steps = worker.tile_of_steps(at);
#pragma unroll
      for (int r = 0; r < R; r++) {
        o[r] = worker.step(raw[r], v, r);
        if (p.steps.data != nullptr) worker.store(raw[r], to_steps, r);
        if (p.update_state) worker.store(raw[r], to, r);
      }
    }
    worker.store_output(o, at, row >= 0);
    at.next_tile(p, w);
    return ++i < run.count;
  };
  while (turn(one, two) && turn(two, one)) {
  }
}

constexpr int kMaxGrid = 65535;  // of dimensions y and z

// Grid: x = tiles of a sequence, a warp each; y and z = sequence.
template <class State, int K, int R>
__global__ void __launch_bounds__(kMaxThreads, 5) single(const __grid_constant__ DecodeParams p, const __grid_constant__ Work w) {
  using T = Tile<State, K, R>;
  const int lane = int(threadIdx.x % 32);
  const int b = int(blockIdx.z) * kMaxGrid + int(blockIdx.y);
  const int tile = int(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const Cursor at(tile & ((1 << w.part_shift) - 1), tile >> w.part_shift, b);
  if (at.h >= p.heads || b >= p.batch) return;
  const Rows rows = look_up(p, b);
  Worker<State, K, R> worker(p, w, lane);
  Token<K, T::size> token;
  token.load(p, w, b, at.h, lane);
  const uint16_t v = worker.load_v(at);

  uint4 raw[R][T::pieces];
  float o[R];
  const bool live = rows.live();
  const char* from = worker.tile(rows.read(), at);
#pragma unroll
  for (int r = 0; r < R; r++) worker.load(raw[r], from, r, live);
  worker.inputs.adopt(token, p);
  char *to = worker.tile(rows.write(), at), *to_steps = worker.tile_of_steps(at);
#pragma unroll
  for (int r = 0; r < R; r++) {
    o[r] = worker.step(raw[r], v, r);
    if (live && p.steps.data != nullptr) worker.store(raw[r], to_steps, r);
    if (live && p.update_state) worker.store(raw[r], to, r);
  }
  worker.store_output(o, at, live);
}

// --- launches ----------------------------------------------------------------------------------------------------------------

struct Call {
  const DecodeParams& p;
  const DecodePlan& plan;
  int multiprocessors;
  cudaStream_t stream;

  template <class State, int K, int R>
  Work work(int64_t grid_warps) const {
    const int64_t tiles = int64_t(p.batch) * p.heads * (p.head_size_v / Tile<State, K, R>::rows);
    Work w{};
    w.tiles = int32_t(tiles), w.each = int32_t(tiles / grid_warps), w.extra = int32_t(tiles % grid_warps);
    while ((Tile<State, K, R>::rows << w.part_shift) < p.head_size_v) w.part_shift++;
    w.stages = plan.stages;
    w.group_reciprocal = ((uint64_t(1) << 32) + p.group - 1) / p.group;
    w.read_first = plan.policy >= 1, w.written_first = plan.policy >= 2;
    return w;
  }

  // CTAs of `plan.warps` warps each with a tile or more.
  template <class State, int K, int R>
  int64_t grid() const {
    const int64_t tiles = int64_t(p.batch) * p.heads * (p.head_size_v / Tile<State, K, R>::rows);
    const int64_t planned = int64_t(multiprocessors) * plan.resident * plan.waves;
    return std::min(planned, (tiles + plan.warps - 1) / plan.warps);
  }

  template <class State, int K, int R, bool BULK>
  void launch_ring() const {
    const auto kernel = ring<State, K, R, BULK>;
    const int bytes = plan.warps * plan.stages * (Tile<State, K, R>::bytes + int(sizeof(Stage)));
    // More than 48 KB has to be asked for, once a device.
    constexpr int kDevices = 64;
    static int allowed[kDevices] = {};
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (device >= kDevices || allowed[device] < bytes) {
      const auto* address = reinterpret_cast<const void*>(kernel);
      check(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "decode: shared memory");
      if (device < kDevices) allowed[device] = bytes;
    }
    const int64_t ctas = grid<State, K, R>();
    const Work w = work<State, K, R>(ctas * plan.warps);
    GDN_LAUNCH(kernel, dim3(unsigned(ctas)), dim3(unsigned(plan.warps * 32)), bytes, stream, p, w);
  }

  template <class State, int K, int R>
  void launch_registers() const {
    const int64_t ctas = grid<State, K, R>();
    const Work w = work<State, K, R>(ctas * plan.warps);
    GDN_LAUNCH((registers<State, K, R>), dim3(unsigned(ctas)), dim3(unsigned(plan.warps * 32)), 0, stream, p, w);
  }

  template <class State, int K, int R>
  void launch_single() const {
    const Work w = work<State, K, R>(1);
    const int warps = std::min(plan.warps, kMaxThreads / 32);  // a plan of another kind may come here for K = 64
    const unsigned x = unsigned(((p.heads << w.part_shift) + warps - 1) / warps);
    const unsigned y = unsigned(std::min(p.batch, kMaxGrid)), z = unsigned((p.batch + kMaxGrid - 1) / kMaxGrid);
    GDN_LAUNCH((single<State, K, R>), dim3(x, y, z), dim3(unsigned(warps * 32)), 0, stream, p, w);
  }

  template <class State, int K>
  bool launch() const {
    // Passes of four rows: 4 KB of K = 128 are two of float32, four of 16 bits.
    const int passes = plan.tile_bytes / (kRowsAPass * 128 * int(sizeof(State)));
    constexpr int whole = 8 / int(sizeof(State));
    // Heads of 64 columns are served, not tuned for: a warp a tile does.
    const DecodeKind kind = K == 128 ? plan.kind : DecodeKind::single;
    if constexpr (K == 128) {
      if (kind == DecodeKind::ring_bulk) {
        if (passes == whole) return launch_ring<State, K, whole, true>(), true;
        if (passes == 2 * whole) return launch_ring<State, K, 2 * whole, true>(), true;
      }
      if (kind == DecodeKind::ring) {
        if (passes == whole) return launch_ring<State, K, whole, false>(), true;
        if (passes == 2 * whole) return launch_ring<State, K, 2 * whole, false>(), true;
      }
      if (kind == DecodeKind::registers) {
        if (passes == whole) return launch_registers<State, K, whole>(), true;
        if (passes == whole / 2) return launch_registers<State, K, whole / 2>(), true;
      }
    }
    if (kind == DecodeKind::single) {
      if (passes >= whole) return launch_single<State, K, whole>(), true;
      if (passes == whole / 2) return launch_single<State, K, whole / 2>(), true;
      return launch_single<State, K, 1>(), true;
    }
    return false;
  }

  template <class State>
  bool launch() const {
    return p.head_size_k == 128 ? launch<State, 128>() : launch<State, 64>();
  }
};

}  // namespace

bool launch_decode_sm90(const DecodeParams& p, int multiprocessors, cudaStream_t stream, int variant) {
  if (p.tokens != 1 || !p.qk_aligned || !p.state.aligned || p.state.v != p.head_size_k) return false;
  if (p.steps.data != nullptr && !(p.steps.aligned && p.steps.v == p.head_size_k)) return false;
  if (p.batch == 0) return true;
  const int size = p.state.dtype == DType::f32 ? 4 : 2;
  const int64_t elements = int64_t(p.batch) * p.heads * p.head_size_v * p.head_size_k;
  // Tiles are counted in 32 bits (the smallest has 256 elements), and h / group is exact below 2^16.
  if (elements / 256 > INT32_MAX || p.heads > 0xffff) return false;
  const bool forced_policy = variant >= 100;
  const int policy = variant / 100 - 1;
  variant %= 100;
  if (variant == kDecodeByHeuristics) variant = decode_plan(elements * size, size, multiprocessors);
  if (variant < 1 || variant > kDecodePlanCount) return false;
  DecodePlan plan = kDecodePlans[variant - 1];
  const int shared = plan.warps * plan.stages * (plan.tile_bytes + int(sizeof(Stage)));
  if (shared > shared_bytes_at_most()) plan = kDecodePlans[kDecodeWithoutRing - 1];
  if (forced_policy) plan.policy = policy;
  const Call call{p, plan, multiprocessors, stream};
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
