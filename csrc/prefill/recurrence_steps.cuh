// The recurrence over chunks by warps of 16 V rows, step by step: for recurrence.cu, which says what is computed, and for fused.cu.
#pragma once
#include "chunk_steps.cuh"
#include "states.cuh"

namespace gdn {

// A chunk: its slot, the token of its row 0, and which of its rows are tokens.
struct Place {
  int64_t slot, token;
  int from, to;
};

// The state that a sequence starts from, of a warp's V rows v0 on; zero where there is none, or the warp does not compute.
template <int N>
__device__ __forceinline__ void begin_state(float (&s)[N][4], const PrefillParams& p, const Sequence& sequence, bool computes, int h, int v0) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = 0.f;
  if (computes && p.initial.data != nullptr && sequence.read >= 0)
    load_states(s, p.initial, sequence.read * p.initial.row + h * p.initial.head + v0 * p.initial.v);
}

// One chunk of one warp: 16 V rows, and the first TILES * 8 tokens; what others there were would change nothing. First X^T and S Q^T, which want
// nothing that is made of k and q.
template <class T, int K, int TILES>
__device__ __forceinline__ void multiply_state(const float (&s)[K / 8][4], float (&u)[TILES][4], float (&o)[TILES][4], const uint8_t* k_tile,
                                               const uint8_t* q_tile, int row_bytes, int lane) {
  const int row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) u[n][i] = 0.f, o[n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < K / 16; k++) {
    const uint32_t a[4] = {Pair<T>::pack(s[2 * k][0], s[2 * k][1]), Pair<T>::pack(s[2 * k][2], s[2 * k][3]),
                           Pair<T>::pack(s[2 * k + 1][0], s[2 * k + 1][1]), Pair<T>::pack(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < TILES / 2; j++) {
      uint32_t b[4];
      const int place = (16 * j + row) * row_bytes + (16 * k + column) * 2;
      load_tiles(b, k_tile + place);
      mma<T>(u[2 * j], a, b[0], b[1]);
      mma<T>(u[2 * j + 1], a, b[2], b[3]);
      load_tiles(b, q_tile + place);
      mma<T>(o[2 * j], a, b[0], b[1]);
      mma<T>(o[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Then all the rest; V rows are in columns v.. of the V tile. SOLVE: there is no coupling; U comes block by block from -L off the diagonal, `lower`, rounded
// for TF32, and the inverses of the diagonal blocks without the identity. (In bf16 errors would grow from block to block where keys are alike.)
template <class T, int K, bool SOLVE = false, int TILES>
__device__ __forceinline__ void advance(float (&s)[K / 8][4], float (&u)[TILES][4], float (&o)[TILES][4], const uint8_t* k_tile, int row_bytes,
                                        const uint8_t* v_tile, int v_row_bytes, const uint8_t* matrices, float scale, int lane,
                                        const float* lower = nullptr, const float* inverses = nullptr) {
  constexpr int kBlocks = TILES / 2;
  const int q = lane % 4;
  const auto* gates = reinterpret_cast<const float*>(matrices + 2 * kMatrixBytes);
  const auto* coupling = reinterpret_cast<const uint2*>(matrices) + lane;
  const auto* scores = reinterpret_cast<const uint2*>(matrices + kMatrixBytes) + lane;
  const int row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;

  // Y^T
#pragma unroll
  for (int j = 0; j < kBlocks; j++) {
    uint32_t v[4];
    load_tiles_transposed(v, v_tile + (16 * j + row) * v_row_bytes + column * 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int n = 2 * j + half, token = 8 * n + 2 * q;
      const float2 gamma = *reinterpret_cast<const float2*>(gates + token);
      const float2 beta = *reinterpret_cast<const float2*>(gates + kChunk + token);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 value = Pair<T>::unpack(v[2 * half + i]);
        u[n][2 * i] = beta.x * (value.x - gamma.x * u[n][2 * i]);
        u[n][2 * i + 1] = beta.y * (value.y - gamma.y * u[n][2 * i + 1]);
      }
      const float x = scale * gamma.x, y = scale * gamma.y;
      o[n][0] *= x, o[n][1] *= y, o[n][2] *= x, o[n][3] *= y;
    }
  }

  // U^T
  uint32_t a[kBlocks][4];
  const auto pack_block = [&](int k) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float(&x)[4] = u[2 * k + half];
      a[k][2 * half] = Pair<T>::pack(x[0], x[1]), a[k][2 * half + 1] = Pair<T>::pack(x[2], x[3]);
    }
  };
  const auto pack_u = [&] {
#pragma unroll
    for (int k = 0; k < kBlocks; k++) pack_block(k);
  };
  // d += what is in a, times blocks
  const auto multiply_triangle = [&](float(&d)[TILES][4], const uint2* blocks) {
#pragma unroll
    for (int k = 0; k < kBlocks; k++)
#pragma unroll
      for (int n = 2 * k; n < TILES; n++) {
        const uint2 b = blocks[block_index(n, k) * 32];
        mma<T>(d[n], a[k], b.x, b.y);
      }
  };
  if constexpr (SOLVE) {
#pragma unroll
    for (int i = 0; i < kBlocks; i++) {
      // Eight sources at a time, in the order 0, 2, 4, 6, 1, 3, 5, 7: as accumulators have them.
      const auto sources_of = [&](uint32_t(&x)[4], int k) {
        x[0] = to_tf32(u[k][0]), x[1] = to_tf32(u[k][2]), x[2] = to_tf32(u[k][1]), x[3] = to_tf32(u[k][3]);
      };
#pragma unroll
      for (int k = 0; k < 2 * i; k++) {
        uint32_t sources[4];
        sources_of(sources, k);
#pragma unroll
        for (int n = 2 * i; n < 2 * i + 2; n++) {
          const uint2 l = *reinterpret_cast<const uint2*>(lower + (8 * n + lane / 4) * kLowerStride + 8 * k + 2 * q);
          mma_tf32(u[n], sources, l.x, l.y);
        }
      }
      uint32_t sources[2][4];
      sources_of(sources[0], 2 * i), sources_of(sources[1], 2 * i + 1);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k <= half; k++) {
          const float2 x = *reinterpret_cast<const float2*>(inverses + (16 * i + 8 * half + lane / 4) * kInverseStride + 8 * k + 2 * q);
          mma_tf32(u[2 * i + half], sources[k], to_tf32(x.x), to_tf32(x.y));
        }
      pack_block(i);
    }
  } else {
    pack_u();
    multiply_triangle(u, coupling);
    pack_u();
  }

  // O^T
  multiply_triangle(o, scores);

  // S
  const float end = gates[kChunk - 1];
#pragma unroll
  for (int n = 0; n < K / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] *= end;
#pragma unroll
  for (int k = 0; k < kBlocks; k++) {
    uint32_t d[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 tail = *reinterpret_cast<const float2*>(gates + 2 * kChunk + 16 * k + 8 * half + 2 * q);
      const float(&x)[4] = u[2 * k + half];
      d[2 * half] = Pair<T>::pack(tail.x * x[0], tail.y * x[1]);
      d[2 * half + 1] = Pair<T>::pack(tail.x * x[2], tail.y * x[3]);
    }
#pragma unroll
    for (int n = 0; n < K / 8; n += 2) {
      uint32_t b[4];
      load_tiles_transposed(b, k_tile + (16 * k + lane % 16) * row_bytes + (8 * n + lane / 16 * 8) * 2);
      mma<T>(s[n], d, b[0], b[1]);
      mma<T>(s[n + 1], d, b[2], b[3]);
    }
  }
}

// O^T of one warp to memory: tiles are turned, so that a lane has two V columns of one token.
template <class T, int N>
__device__ __forceinline__ void store_output(const PrefillParams& p, const float (&o)[N][4], const Place& at, int h, int v0, int lane) {
  auto* output = static_cast<uint16_t*>(p.output) + h * p.output_stride.head + v0 + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const uint32_t low = transpose_tile(Pair<T>::pack(o[n][0], o[n][1])), high = transpose_tile(Pair<T>::pack(o[n][2], o[n][3]));
    const int t = 8 * n + lane / 4;
    if (t < at.from || t >= at.to) continue;
    uint16_t* to = output + (at.token + t) * p.output_stride.token;
    if (p.output_paired) {
      *reinterpret_cast<uint32_t*>(to) = low;
      *reinterpret_cast<uint32_t*>(to + 8) = high;
    } else {
      to[0] = uint16_t(low), to[1] = uint16_t(low >> 16), to[8] = uint16_t(high), to[9] = uint16_t(high >> 16);
    }
  }
}

// Behind the first `done` chunks of a sequence, or where there are none: the state of V rows v0 on, to where it belongs.
template <int N>
__device__ __forceinline__ void leave_states(float (&s)[N][4], const PrefillParams& p, const Sequence& sequence, int64_t done, bool last, int h,
                                             int v0) {
  int64_t checkpoint = -1;
  if (p.checkpoints.data != nullptr && p.checkpoint_every > 0 && done > 0) {
    // In chunks, of which checkpoints and the ends of all chunks but a sequence's last are whole numbers.
    const uint32_t every = uint32_t(p.checkpoint_every / kChunk), prefix = uint32_t(sequence.prefix / kChunk), here = prefix + uint32_t(done);
    // A boundary counts once the last of its tokens is there: a chunk that is cut short has not reached it.
    if (here % every == 0 && int64_t(here) * kChunk <= sequence.prefix + sequence.length) {
      const int64_t entry = sequence.starts + (here / every - prefix / every - 1);
      const Index& rows = p.pages.indices.data != nullptr ? p.pages.indices : p.checkpoint_rows;
      checkpoint = rows.data != nullptr ? load_index(rows, entry) : entry;
    }
  }
#pragma unroll 1
  for (int what = 0; what < 2; what++) {
    const States& states = what == 0 ? p.checkpoints : p.final;
    const int64_t row = what == 0 ? checkpoint : last && states.data != nullptr ? sequence.write : -1;
    if (row >= 0) store_states(s, states, row * states.row + h * states.head + v0 * states.v);
  }
}

}  // namespace gdn
