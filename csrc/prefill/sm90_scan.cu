// Prefill on sm_90a, split sequences, between the passes: the state that each segment starts from,
//     start(1) = end(0),   start(j + 1) = start(j) transition(j) + local(j),
// where end(0) is what the first segment, which knows its initial state, reached. V rows need nothing of each other: a CTA
// takes 16 of them through all segments of a sequence and head. A transition that is zero is not read, and where there is
// none, no thread waits for another: each moves its own elements on.
//
// Products are of TF32 in three parts (high high, low high, high low), which is float32 but for its last bits. A warp has 32
// columns of a transition and half of k. Nobody else reads its part, so each thread copies what it will multiply, two
// transitions ahead, and waits for its own copies only. The state is split into its parts once, and lies in shared memory as
// fragments. The sums of both halves of k meet in shared memory: half the columns are added by either.
#include "sequence.cuh"
#include "sm90_workspace.cuh"

#if GDN_SM90
#include "../common/sm90_primitives.cuh"
#endif

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kRows = 16;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kLocals = 8;  // segments of `local` in shared memory
constexpr int kStages = 2;  // transitions there
// A state as left operands: for row g the pairs of columns, each with row g + 8 beside it, 16 bytes. An odd number of these a
// row, so that no two lanes of a read fall into one bank.
constexpr int kStride = 4 * (kHead / 2 + 1);
constexpr int kPart = 8 * kStride;
constexpr int kLocalFloats = kRows * kHead, kStageFloats = kHead * kHead;
constexpr int kBytes = (kStages * kStageFloats + kLocals * kLocalFloats + 2 * kPart + kRows * kHead) * 4;
constexpr int kNone = INT32_MAX;

__global__ void __launch_bounds__(kThreads, 1) scan(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan) {
  GDN_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row0 = blockIdx.x % (kHead / kRows) * kRows;
  const int h = plan.first_head + blockIdx.x / (kHead / kRows) % plan.heads;
  const int index = blockIdx.x / (kHead / kRows) / plan.heads;
  const Sequence sequence = get_sequence(p, index);
  let_next_start();
  wait_for_previous();
  if (sequence.chunks == 0) return;
  const int64_t first = sequence.begin / (int64_t(plan.path.segment) * kChunk) + 2 * int64_t(index);
  const int count = int((sequence.chunks + plan.path.segment - 1) / plan.path.segment);
  if (count == 1) return;
  const int64_t step = int64_t(plan.heads) * (2 * kStageFloats);  // from segment to segment

  // Segments whose transition is not zero: `waiting`, of the 32 from `base`, those not asked for yet; `ahead`, on its way,
  // this lane's of the 32 behind. All but the first and the last segment have one.
  const int32_t* const flags = plan.nonzero + first * plan.heads + h - plan.first_head;
  const auto flag = [&](int j) { return j >= 1 && j < count - 1 ? flags[int64_t(j) * plan.heads] : 0; };
  const int32_t now = flag(lane);
  int32_t ahead = flag(32 + lane);
  int base = 0;
  uint32_t waiting;
  // At segment j: the next of them; not further than the 32 behind those that j is of.
  const auto find_next = [&](int j) {
    if (waiting == 0 && base <= j) {
      base += 32;
      waiting = __ballot_sync(0xffffffffu, ahead != 0);
      ahead = flag(base + 32 + lane);
    }
    const int next = waiting != 0 ? base + __popc((waiting & -waiting) - 1) : kNone;
    waiting &= waiting - 1;
    return next;
  };

  // This thread's elements of states: of rows g and g + 8, columns column + 16 half + 4 q and the three behind.
  const int half = warp / 4, column = 32 * (warp % 4);
  float* const place0 = plan.segment_state(first, h, 0) + (row0 + g) * kHead + column + 16 * half + 4 * q;
  const auto place = [&](int j) { return place0 + j * step; };
  float* const stages = reinterpret_cast<float*>(shared) + 4 * threadIdx.x;
  float* const locals = stages + kStages * kStageFloats;
  const auto local_at = [&](int j) { return locals + j % kLocals * kLocalFloats; };
  const auto fetch_local = [&](int j) {
    if (j < count - 1) {
#pragma unroll
      for (int i = 0; i < 2; i++) copy_async(local_at(j) + i * 4 * kThreads, place(j) + 8 * i * kHead, true);
    }
  };
  // And of transitions: of each 16 of this half of k rows 4 q to 4 q + 3, of each row four columns, one of each tile. So q
  // and q + 4 of a product's eight k are rows 4 q and 4 q + 1, then 4 q + 2 and 4 q + 3, and column g of tile n is
  // 4 (g / 2) + 16 (g % 2) + n, by which a lane's sums are of neighbouring columns.
  const float* const transition0 = plan.segment_state(first, h, 1) + (64 * half + 4 * q) * kHead + column + g / 2 * 4 + g % 2 * 16;
  const auto fetch_transition = [&](int j, float* stage, int block) {
    const float* from = transition0 + j * step + 16 * block * kHead;
#pragma unroll
    for (int i = 0; i < 4; i++) copy_async(stage + (4 * block + i) * 4 * kThreads, from + i * kHead, true);
  };
  float* const parts = reinterpret_cast<float*>(shared) + kStages * kStageFloats + kLocals * kLocalFloats;
  float* const exchange = parts + 2 * kPart + 4 * lane;

  // What a product reads of a float32, and the rest.
  const auto high = [](float x) { return round_to_tf32(x) & 0xffffe000u; };
  const auto low = [](float x, uint32_t high) { return __float_as_uint(x - __uint_as_float(high)); };

  float4 state[2];
#pragma unroll
  for (int i = 0; i < 2; i++) state[i] = *reinterpret_cast<const float4*>(place(0) + 8 * i * kHead);
#pragma unroll
  for (int j = 1; j < kLocals; j++) fetch_local(j);
  // Transitions under way: of segment `next`, which lies in stage fetched % 2 if it is the only one, and of the one behind.
  uint32_t fetched = 0;
  const auto fetch_next = [&](int j) {
    const int found = find_next(j);
    if (found != kNone) {
#pragma unroll
      for (int block = 0; block < 4; block++) fetch_transition(found, stages + fetched % kStages * kStageFloats, block);
      fetched++;
    }
    return found;
  };
  // A turn of the loop ends with a commit, and these are the kLocals - 1 before the first.
  waiting = __ballot_sync(0xffffffffu, now != 0);
  int next = fetch_next(1);
  copy_commit();
  int behind = next != kNone ? fetch_next(1) : kNone;
#pragma unroll
  for (int i = 0; i < kLocals - 2; i++) copy_commit();

  for (int j = 1;; j++) {
    const bool multiply = j == next;
    // The transition was asked for two turns ago or, of the first two, before the loop.
    if (multiply && j > 2)
      copy_wait<1>();
    else
      copy_wait<kLocals - 2>();
    float4 local[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      local[i] = *reinterpret_cast<const float4*>(local_at(j) + i * 4 * kThreads);
      *reinterpret_cast<float4*>(place(j) + 8 * i * kHead) = state[i];
    }
    if (j == count - 1) return;
    if (multiply) {
      float* const stage = stages + (behind == kNone ? fetched - 1 : fetched - 2) % kStages * kStageFloats;
      const float values[4][2] = {{state[0].x, state[1].x}, {state[0].y, state[1].y}, {state[0].z, state[1].z}, {state[0].w, state[1].w}};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t x[4], y[4];
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const float value = values[2 * i + m / 2][m % 2];
          x[m] = high(value), y[m] = round_to_tf32(__uint_as_float(low(value, x[m])));
        }
        float* to = parts + g * kStride + 2 * (column + 16 * half + 4 * q + 2 * i);
        *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
        *reinterpret_cast<uint4*>(to + kPart) = make_uint4(y[0], y[1], y[2], y[3]);
      }
      __syncthreads();  // the state is there, and what was exchanged before has been read
      // The one after next takes this one's stage, block by block.
      const int found = behind != kNone ? find_next(j) : kNone;
      float large[4][4] = {}, small[4][4] = {};
      const float* const left = parts + g * kStride + 2 * (64 * half + 4 * q);
#pragma unroll
      for (int block = 0; block < 4; block++) {
        uint4 right[4];
#pragma unroll
        for (int i = 0; i < 4; i++) right[i] = *reinterpret_cast<const uint4*>(stage + (4 * block + i) * 4 * kThreads);
        uint32_t a[2][4], a_low[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const uint4 x = *reinterpret_cast<const uint4*>(left + 2 * (16 * block + 2 * k));
          const uint4 y = *reinterpret_cast<const uint4*>(left + 2 * (16 * block + 2 * k) + kPart);
          a[k][0] = x.x, a[k][1] = x.y, a[k][2] = x.z, a[k][3] = x.w;
          a_low[k][0] = y.x, a_low[k][1] = y.y, a_low[k][2] = y.z, a_low[k][3] = y.w;
        }
        if (block > 0 && found != kNone) fetch_transition(found, stage, block - 1);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          uint32_t b[4][2], b_low[4][2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const uint4& x = right[2 * k + i];
            const float row[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
#pragma unroll
            for (int n = 0; n < 4; n++) b[n][i] = high(row[n]), b_low[n][i] = low(row[n], b[n][i]);
          }
#pragma unroll
          for (int n = 0; n < 4; n++) mma_tf32(large[n], a[k], b[n][0], b[n][1]);
#pragma unroll
          for (int n = 0; n < 4; n++) mma_tf32(small[n], a_low[k], b[n][0], b[n][1]);
#pragma unroll
          for (int n = 0; n < 4; n++) mma_tf32(small[n], a[k], b_low[n][0], b_low[n][1]);
        }
      }
      // Of the two fours of columns one is the other half's to add.
      float4 mine[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 x[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const int at = 2 * i + m;
          x[m] = make_float4(large[0][at] + small[0][at], large[1][at] + small[1][at], large[2][at] + small[2][at], large[3][at] + small[3][at]);
        }
        mine[i] = half == 0 ? x[0] : x[1];
        *reinterpret_cast<float4*>(exchange + (2 * warp + i) * 128) = half == 0 ? x[1] : x[0];
      }
      __syncthreads();  // what is exchanged is there, and the state has been read
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float4 x = *reinterpret_cast<const float4*>(exchange + (2 * (warp ^ 4) + i) * 128);
        local[i].x += mine[i].x + x.x, local[i].y += mine[i].y + x.y, local[i].z += mine[i].z + x.z, local[i].w += mine[i].w + x.w;
      }
      if (found != kNone) fetch_transition(found, stage, 3), fetched++;
      next = behind, behind = found;
    }
    if (behind == kNone && (waiting != 0 || base <= j)) behind = fetch_next(j);
    if (next == kNone) next = behind, behind = kNone;
    fetch_local(j + kLocals - 1);
    copy_commit();
#pragma unroll
    for (int i = 0; i < 2; i++) state[i] = local[i];
  }
}

}  // namespace

void launch_scan(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  static bool allowed[64] = {};  // by device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64 || !allowed[device]) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(scan), cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
    if (device < 64) allowed[device] = true;
  }
  const int64_t grid = int64_t(p.num_seqs) * plan.heads * (kHead / kRows);
  GDN_LAUNCH_BEHIND(scan, unsigned(grid), kThreads, kBytes, stream, p, plan);
  check(cudaGetLastError(), "prefill on sm_90a, scan");
}

}  // namespace sm90
}  // namespace gdn
#endif
