// Prefill, second stage: the recurrence over a sequence's chunks, one CTA a sequence, head and share of its V rows.
//
// With gamma_t the decay from the chunk's start to token t, tail_t that from t to its end, and coupling and scores from the
// first stage (chunks.cu), a chunk takes the state S [V, K] on by
//     X^T = S K^T                                              [V, 64]
//     Y^T = beta (V^T - gamma X^T)                             columns scaled, float32
//     U^T = Y^T + Y^T coupling^T                               the identity part added in float32
//     O^T = scale gamma (S Q^T) + U^T scores^T
//     S   = gamma_64 S + (tail U^T) K
// All of it is kept transposed, V rows first, so that S, Y and U are accumulators of one product and left operands of the
// next in the same registers: a warp owns 16 V rows from the first token to the last, and the state never leaves it. V rows
// need nothing of each other, so they may be spread over CTAs until the card is full; what a CTA reads of q, k, coupling
// and scores is then read again by its neighbours, from L2.
//
// Tiles come by cp.async, the next chunk's while this one is worked on (where shared memory allows: plan.stages), one
// barrier a chunk. Warps beyond those that compute only help to load.
#include "recurrence_steps.cuh"

namespace gdn {
namespace {

constexpr int kLoaders = 4;  // warps a CTA at least

// Shared memory of one stage.
template <int K>
struct Stage {
  static constexpr int row_bytes = 2 * K + 16;  // 8 rows of a tile fall into different banks
  static constexpr int q = kChunk * row_bytes;
  static constexpr int matrices = 2 * q;  // coupling, scores, gates: as in the workspace
  static constexpr int v = matrices + kSlotBytes;
  static __host__ __device__ int v_row_bytes(int rows) { return 2 * rows + 16; }
  static __host__ __device__ int bytes(int rows) { return v + kChunk * v_row_bytes(rows); }
};

template <int K>
__device__ __forceinline__ void copy_tile(uint8_t* tile, const char* packed, const uint16_t* data, int64_t stride, const Place& at) {
  constexpr int kPieces = K / 8;
  for (int i = threadIdx.x; i < kChunk * kPieces; i += blockDim.x) {
    const int row = i / kPieces, column = i % kPieces * 8;
    void* to = tile + row * Stage<K>::row_bytes + column * 2;
    if (packed != nullptr) {
      copy_async(to, packed + (row * K + column) * 2, true);
    } else {
      const bool valid = row >= at.from && row < at.to;
      copy_async(to, valid ? data + (at.token + row) * stride + column : data, valid);
    }
  }
}

// Everything that a chunk needs, on its way to `stage`.
template <int K>
__device__ __forceinline__ void copy_chunk(uint8_t* stage, const PrefillParams& p, const PrefillPlan& plan, const Place& at, int h, int v0) {
  constexpr int kTile = kChunk * K * 2;
  const int kh = h / p.k_group, qh = h / p.q_group;
  copy_tile<K>(stage, plan.packed_k ? plan.k_tiles + (at.slot * (p.heads / p.k_group) + kh) * kTile : nullptr,
               static_cast<const uint16_t*>(p.k) + kh * p.k_stride.head, p.k_stride.token, at);
  copy_tile<K>(stage + Stage<K>::q, plan.packed_q ? plan.q_tiles + (at.slot * (p.heads / p.q_group) + qh) * kTile : nullptr,
               static_cast<const uint16_t*>(p.q) + qh * p.q_stride.head, p.q_stride.token, at);
  const char* chunk = plan.chunk(at.slot, h);
  for (int i = threadIdx.x * 16; i < kSlotBytes; i += blockDim.x * 16) copy_async(stage + Stage<K>::matrices + i, chunk + i, true);
  const auto* v = static_cast<const uint16_t*>(p.v) + h / p.v_group * p.v_stride.head + v0;
  const int pieces = plan.rows / 8, row_bytes = Stage<K>::v_row_bytes(plan.rows);
  for (int i = threadIdx.x; i < kChunk * pieces; i += blockDim.x) {
    const int row = i / pieces, column = i % pieces * 8;
    const bool valid = row >= at.from && row < at.to;
    uint8_t* to = stage + Stage<K>::v + row * row_bytes + column * 2;
    const uint16_t* from = valid ? v + (at.token + row) * p.v_stride.token + column : v;
    if (p.v_aligned) {
      copy_async(to, from, valid);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) reinterpret_cast<uint16_t*>(to)[j] = valid ? from[j] : uint16_t(0);
    }
  }
}

// Grid: sequence, head of the pass, share of its V rows, the last fastest.
template <class T, int K>
__global__ void __launch_bounds__(256, 1) recurrence(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillPlan plan) {
  GDN_SHARED(shared);
  if (p.zero_rest && plan.first_head == 0) zero_rest(p, p.head_size_v);
  const int shares = p.head_size_v / plan.rows;
  const int share = blockIdx.x % shares, h = plan.first_head + blockIdx.x / shares % plan.heads;
  const int index = blockIdx.x / shares / plan.heads;
  const Sequence sequence = get_sequence(p, index);
  if (sequence.chunks == 0 && !p.copy_empty) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool computes = 16 * warp < plan.rows;
  const int v0 = share * plan.rows + 16 * warp;
  const int stage_bytes = Stage<K>::bytes(plan.rows), v_row_bytes = Stage<K>::v_row_bytes(plan.rows);
  const auto place = [&](int64_t c) {
    return Place{sequence.slot(index) + c, sequence.first_token(c), sequence.from(c), sequence.to(c)};
  };
  const auto fetch = [&](int64_t c) {
    if (c < sequence.chunks)
      copy_chunk<K>(shared + (plan.stages == 2 ? c % 2 : 0) * stage_bytes, p, plan, place(c), h, share * plan.rows);
    copy_commit();
  };

  if (plan.stages == 2) fetch(0);
  float s[K / 8][4];
  begin_state(s, p, sequence, computes, h, v0);

  int64_t c = 0;
  do {
    if (c < sequence.chunks) {
      if (plan.stages == 2) {
        copy_wait<0>();
        __syncthreads();  // this chunk is there, and everyone is done with the one before
        fetch(c + 1);
      } else {
        __syncthreads();
        fetch(c);
        copy_wait<0>();
        __syncthreads();
      }
      if (computes) {
        const uint8_t* stage = shared + (plan.stages == 2 ? c % 2 : 0) * stage_bytes;
        float u[8][4], o[8][4];
        multiply_state<T, K>(s, u, o, stage, stage + Stage<K>::q, Stage<K>::row_bytes, lane);
        advance<T, K>(s, u, o, stage, Stage<K>::row_bytes, stage + Stage<K>::v + 32 * warp, v_row_bytes, stage + Stage<K>::matrices, p.scale, lane);
        store_output<T>(p, o, place(c), h, v0, lane);
      }
    }
    if (c < sequence.chunks) c++;
    if (computes) leave_states(s, p, sequence, c, c >= sequence.chunks, h, v0);
  } while (c < sequence.chunks);
}

template <class T, int K>
void launch(const PrefillParams& p, const PrefillPlan& plan, cudaStream_t stream) {
  const int bytes = plan.stages * Stage<K>::bytes(plan.rows);
  static int allowed[64] = {};  // by device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64 || allowed[device] < bytes) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(recurrence<T, K>), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "cudaFuncSetAttribute");
    if (device < 64) allowed[device] = bytes;
  }
  const int warps = plan.rows / 16 > kLoaders ? plan.rows / 16 : kLoaders;
  const int64_t grid = int64_t(p.num_seqs) * plan.heads * (p.head_size_v / plan.rows);
  GDN_LAUNCH((recurrence<T, K>), unsigned(grid), 32 * warps, bytes, stream, p, plan);
  check(cudaGetLastError(), "prefill, second stage");
}

template <class T>
void launch(const PrefillParams& p, const PrefillPlan& plan, cudaStream_t stream) {
  p.head_size_k == 128 ? launch<T, 128>(p, plan, stream) : launch<T, 64>(p, plan, stream);
}

}  // namespace

int64_t recurrence_shared_bytes(int head_size_k, int rows) { return head_size_k == 128 ? Stage<128>::bytes(rows) : Stage<64>::bytes(rows); }

void launch_recurrence(const PrefillParams& p, const PrefillPlan& plan, cudaStream_t stream) {
  p.dtype == DType::bf16 ? launch<__nv_bfloat16>(p, plan, stream) : launch<__half>(p, plan, stream);
}

}  // namespace gdn
