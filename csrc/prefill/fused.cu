// Prefill in one launch: a CTA takes one head of a sequence, or some of its V rows, from the first token to the last, and makes of each
// chunk both what chunks.cu makes, in shared memory, and what recurrence.cu makes of that; these say what is computed.
//
// For calls of short sequences, whose time is not that of their tokens: a second launch, the way of 11 KB a chunk and head through
// memory, and what a large kernel does before its first chunk all cost more than the 64x64 work that state heads and V shares
// repeat here.
//
//   inverse    Only diagonal blocks of I + L are inverted. What would be the inverse's off-diagonal blocks takes 2 us of a chunk's 7, serial
//              work of one warp, on an H200; instead U comes block by block, with products in TF32:
//                  U_i = inverse_ii (Y_i - sum over m < i of L_im U_m)
//   warps      Warps 0 to 3 make K K^T, L and inverses, one of them the gates before; warps 4 to 7 meanwhile Q K^T and the scores, and if there
//              are no more than 64 V rows, these are theirs: products with the state hide behind the inverses. One CTA a multiprocessor: it has
//              about six times the instructions of the path for sm_90a a chunk and head, so this file is for calls that leave multiprocessors
//              idle.
//   memory     Two places for tiles: a chunk's come while the one before is worked on.
//   16 tokens  A chunk that ends with its 16th row at the latest is worked on as 16 tokens: a few tokens after a shared prefix, or
//              the drafts of speculative decoding.
#include "chunk_steps.cuh"
#include "recurrence_steps.cuh"

namespace gdn {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// Whether products with the state come before a barrier. Compilers for older architectures then run out of registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kAhead = false;
#else
constexpr bool kAhead = true;
#endif

template <int K>
struct Shared {
  // One of two places for what comes from memory: tiles of k and q, words with g and beta, V.
  static constexpr int q = kChunk * kTileRow<K>, words = 2 * q, v = words + 2 * kChunk * 4;
  static constexpr int v_row_bytes = 2 * 128 + 16;
  static constexpr int stage = v + kChunk * v_row_bytes;
  // Behind them what is made here: L, off the diagonal -L; the inverses of diagonal blocks without the identity; gates; scores and more gates, as in
  // the workspace.
  static constexpr int lower = 2 * stage, inverses = lower + kLowerBytes, gates = inverses + kInverseBytes / 4;
  static constexpr int matrices = gates + int(sizeof(Gates)), bytes = matrices + kSlotBytes;
};

// This thread's pieces of a tile [64, K]: eight elements each, of row(0) and every `rows`-th behind it.
template <int K>
struct Pieces {
  static constexpr int lanes = K / 8, rows = kThreads / lanes, steps = kChunk / rows;

  static __device__ __forceinline__ int row(int i) { return int(threadIdx.x) / lanes + i * rows; }
  static __device__ __forceinline__ int column() { return int(threadIdx.x) % lanes * 8; }
  static __device__ __forceinline__ uint8_t* at(uint8_t* tile, int i) { return tile + row(i) * kTileRow<K> + column() * 2; }
};

// Pieces of 16 bytes on their way to shared memory: of `row` and every STEP rows on, COUNT of them; of rows that are no tokens zeros.
template <int STEP, int COUNT>
__device__ __forceinline__ void fetch_rows(uint8_t* to, int pitch, const uint16_t* from, int64_t stride, bool aligned, const Place& at, int row) {
  from += (at.token + row) * stride;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < COUNT; i++, row += STEP, to += STEP * pitch, from += STEP * stride) copy_async(to, from, row >= at.from && row < at.to);
  } else {
#pragma unroll 1
    for (int i = 0; i < COUNT; i++, row += STEP, to += STEP * pitch, from += STEP * stride)
#pragma unroll 1
      for (int j = 0; j < 8; j++) reinterpret_cast<uint16_t*>(to)[j] = row >= at.from && row < at.to ? from[j] : uint16_t(0);
  }
}

template <class T, int K>
__device__ __forceinline__ void normalise_tile(uint8_t* tile) {
  using P = Pieces<K>;
#pragma unroll
  for (int i = 0; i < P::steps; i++) {
    auto* piece = reinterpret_cast<uint4*>(P::at(tile, i));
    uint4 x = *piece;
    normalise<T, P::lanes>(x);
    *piece = x;
  }
}

// The aligned word that a token's g or beta is in.
struct Word {
  const char* address;
  uint32_t shift;

  __device__ __forceinline__ Word(const void* data, const Strides3& stride, DType dtype, int64_t token, int h) {
    address = static_cast<const char*>(data) + (token * stride.token + h * stride.head) * (dtype == DType::f32 ? 4 : 2);
    const uint32_t odd = uint32_t(reinterpret_cast<uintptr_t>(address)) & 2;
    address -= odd, shift = odd * 8;
  }
};

// The lines of a state's V rows into L2.
__device__ __forceinline__ void prefetch_state(const States& states, int64_t row, int h, int v0, int rows, int columns) {
  const int size = states.dtype == DType::f32 ? 4 : states.dtype == DType::bf16 || states.dtype == DType::f16 ? 2 : 1;
  const int lines = columns * size / 64;  // halves: rows may start anywhere, and a line that is asked for twice comes once
  for (int i = threadIdx.x; i < rows * lines; i += kThreads)
    prefetch_line(static_cast<const char*>(states.data) + (row * states.row + h * states.head + (v0 + i / lines) * states.v) * size + i % lines * 64);
}

// Grid: sequence, head, share of its V rows, the last fastest.
template <class T, int K>
__global__ void __launch_bounds__(kThreads, 1) fused(const __grid_constant__ PrefillParams p, const int rows) {
  using S = Shared<K>;
  GDN_SHARED(shared);
  const int shares = p.head_size_v / rows;
  const int share = blockIdx.x % shares, h = blockIdx.x / shares % p.heads, index = blockIdx.x / shares / p.heads;
  // Where the tokens lie is known a load later. Meanwhile those that would be the first if all sequences had one length come to L2; of one
  // sequence, they are.
  const auto prefetch_rows = [&](const void* data, const Strides3& stride, int head, int bytes) {
    const int64_t token = int64_t(index) * (uint32_t(p.num_tokens) / uint32_t(p.num_seqs)) + threadIdx.x % kChunk;
    const int at = int(threadIdx.x) / kChunk * 128;
    if (token < p.num_tokens && at < bytes) prefetch_line(static_cast<const char*>(data) + (token * stride.token + head * stride.head) * 2 + at);
  };
  prefetch_rows(p.k, p.k_stride, h / p.k_group, 2 * K);
  prefetch_rows(p.q, p.q_stride, h / p.q_group, 2 * K);
  const Sequence sequence = get_sequence(p, index);
  if (sequence.chunks == 0 && !p.copy_empty) {
    if (p.zero_rest) zero_rest(p, p.head_size_v);
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, role = warp % 4;
  const int my_rows = (warp + 4) % kWarps * 16;
  const bool computes = my_rows < rows;
  const int v0 = share * rows + my_rows;
  const int chunks = int(sequence.chunks);
  const auto place = [&](int c) { return Place{0, sequence.first_token(c), sequence.from(c), sequence.to(c)}; };
  const auto stage_of = [&](int c) { return shared + c % 2 * S::stage; };
  const auto fetch = [&](int c) {
    if (c < chunks) {
      const Place at = place(c);
      uint8_t* stage = stage_of(c);
      const int t = threadIdx.x % kChunk;
      const bool beta = threadIdx.x >= kChunk;
      const void* data = beta ? p.beta : p.g;
      if (threadIdx.x < 2 * kChunk && t >= at.from && t < at.to && data != nullptr)
        copy_word(stage + S::words + threadIdx.x * 4,
                  Word(data, beta ? p.beta_stride : p.g_stride, beta ? p.beta_dtype : p.g_dtype, at.token + t, h).address);
      using P = Pieces<K>;
      const auto* k = static_cast<const uint16_t*>(p.k) + h / p.k_group * p.k_stride.head + P::column();
      const auto* q = static_cast<const uint16_t*>(p.q) + h / p.q_group * p.q_stride.head + P::column();
      fetch_rows<P::rows, P::steps>(P::at(stage, 0), kTileRow<K>, k, p.k_stride.token, p.k_aligned, at, P::row(0));
      fetch_rows<P::rows, P::steps>(P::at(stage + S::q, 0), kTileRow<K>, q, p.q_stride.token, p.q_aligned, at, P::row(0));
      // A thread takes a row's every fourth piece of 16 bytes of V.
      const int row = threadIdx.x / 4, pieces = rows / 8;
      const auto* v = static_cast<const uint16_t*>(p.v) + h / p.v_group * p.v_stride.head + share * rows;
#pragma unroll 1
      for (int piece = threadIdx.x % 4; piece < pieces; piece += 4)
        fetch_rows<1, 1>(stage + S::v + row * S::v_row_bytes + piece * 16, 0, v + piece * 8, p.v_stride.token, p.v_aligned, at, row);
    }
    copy_commit();
  };

  // The state takes longest to come, and is asked for last: registers wait for nothing that comes before it.
  if (p.initial.data != nullptr && sequence.read >= 0) prefetch_state(p.initial, sequence.read, h, share * rows, rows, K);
  fetch(0);
  GateBits bits;
  if (warp <= 1) load_raw_gate(bits, p, h);
  float s[K / 8][4];
  begin_state(s, p, sequence, computes, h, v0);

  auto *lower = reinterpret_cast<float*>(shared + S::lower), *inverses = reinterpret_cast<float*>(shared + S::inverses);
  auto& gates = *reinterpret_cast<Gates*>(shared + S::gates);
  auto* scores = reinterpret_cast<uint2*>(shared + S::matrices + kMatrixBytes);
  int c = 0;
  do {
    if (c < chunks) {
      const Place at = place(c);
      uint8_t *stage = stage_of(c), *k_tile = stage, *q_tile = stage + S::q;
      copy_wait<0>();
      if (p.l2norm) normalise_tile<T, K>(k_tile), normalise_tile<T, K>(q_tile);  // each thread what it has brought
      __syncthreads();  // this chunk is there, and everyone is done with the one before
      fetch(c + 1);

      const bool few = at.to <= 16;
      float products[8][4];
      if (warp == (few ? 1 : 0)) {
        const auto* words = reinterpret_cast<const uint32_t*>(stage + S::words);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int t = lane + 32 * i;
          bits.g[i] = {words[t], Word(p.g, p.g_stride, p.g_dtype, at.token + t, h).shift};
          bits.beta[i] = {words[kChunk + t], Word(p.beta, p.beta_stride, p.beta_dtype, at.token + t, h).shift};
        }
        make_gates(p, gates, reinterpret_cast<float*>(shared + S::matrices + 2 * kMatrixBytes), bits, at.from, at.to);
      }
      if (!few || role == 0) multiply<T, K>(products, warp < 4 ? k_tile : q_tile, k_tile, role, lane);
      __syncthreads();  // the gates are there

      const auto rest = [&](auto& u, auto& o) {
        constexpr bool kFew = sizeof(o) == 2 * sizeof(o[0]);
        const int block = kFew ? 0 : role;  // of 16 rows
        if (block == role && warp >= 4) {
          uint32_t words[2];
          each_decay(gates, block, lane, [&](int j, int half, int i, int row, int column, float2 decay) {
            put_scores<T>(scores, products, p.scale, words, j, half, i, row, column, decay, block, lane);
          });
        }
        if (block == role && warp < 4) {
          each_decay(gates, block, lane, [&](int j, int half, int i, int row, int column, float2 decay) {
            const float2 l = lower_pair(products, gates, j, half, i, row, column, decay);
            auto* to = &lower[row * kLowerStride + column];
            if (j == block)
              *reinterpret_cast<float2*>(to) = l;
            else
              *reinterpret_cast<uint2*>(to) = make_uint2(to_tf32(-l.x), to_tf32(-l.y));
          });
          __syncwarp();  // a diagonal block is its own warp's work
          float* inverse = inverses + 16 * block * kInverseStride;
          invert_block(inverse, lower + 16 * block * kLowerStride + 16 * block, lane);
          if (lane < 16) inverse[lane * kInverseStride + lane] = 0.f;  // its own column's
        }
        if (kAhead && computes) multiply_state<T, K>(s, u, o, k_tile, q_tile, kTileRow<K>, lane);
        __syncthreads();  // L, inverses and scores are there
        if (computes) {
          if (!kAhead) multiply_state<T, K>(s, u, o, k_tile, q_tile, kTileRow<K>, lane);
          advance<T, K, true>(s, u, o, k_tile, kTileRow<K>, stage + S::v + my_rows * 2, S::v_row_bytes, shared + S::matrices, p.scale, lane, lower,
                              inverses);
          store_output<T>(p, o, at, h, v0, lane);
        }
      };
      if (few) {
        float u[2][4], o[2][4];
        rest(u, o);
      } else {
        float u[8][4], o[8][4];
        rest(u, o);
      }
      c++;
    }
    if (computes) leave_states(s, p, sequence, c, c >= chunks, h, v0);
  } while (c < chunks);
  if (p.zero_rest) zero_rest(p, p.head_size_v);  // last: it reads before it knows whether there is anything to do
}

}  // namespace

// bf16 and K = 128, since only there is it chosen; bindings.cu refuses the others.
void launch_fused(const PrefillParams& p, cudaStream_t stream) {
  constexpr auto kernel = fused<__nv_bfloat16, 128>;
  constexpr int kBytes = Shared<128>::bytes;
  static bool allowed[64] = {};  // by device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64 || !allowed[device]) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
    if (device < 64) allowed[device] = true;
  }
  const int64_t grid = int64_t(p.num_seqs) * p.heads * (p.head_size_v / p.fused_rows);
  GDN_LAUNCH(kernel, unsigned(grid), kThreads, kBytes, stream, p, p.fused_rows);
  check(cudaGetLastError(), "prefill in one launch");
}

}  // namespace gdn
