// Prefill on sm_90a, split sequences, between the passes: the state that each segment starts from,
//     start(1) = end(0),   start(j + 1) = start(j) transition(j) + local(j),
// where end(0) is what the first segment, which knows its initial state, reached. V rows need nothing of each other: a CTA
// takes 16 of them through all segments of a sequence and head, then the next. A transition that is zero is not read, and where there is
// none, no thread waits for another: each moves its own elements on.
//
// Transitions are of fp16 (Transition), as which TF32 holds them whole, so products are of TF32 in two parts of the state (high,
// low), which is float32 but for its last bits. A warp has 32 columns of a transition and half of k. Transitions come whole, by the
// copy engine, which asks nothing of the warps: each copying its own part, these needed 64 instructions of four lines each, and a
// segment took 2.3 us, however many bytes a transition had. The state is split into its parts once, and lies in shared memory as
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
constexpr int kStages = 3;  // transitions there
// A state as left operands: for row g the pairs of columns, each with row g + 8 beside it, 16 bytes. An odd number of these a
// row, so that no two lanes of a read fall into one bank.
constexpr int kStride = 4 * (kHead / 2 + 1);
constexpr int kPart = 8 * kStride;
constexpr int kLocalFloats = kRows * kHead, kStageFloats = Transition::bytes / 4;
constexpr int kBarriersAt = (kStages * kStageFloats + kLocals * kLocalFloats + 2 * kPart + kRows * kHead) * 4, kBytes = kBarriersAt + kStages * 8;
static_assert(Transition::bytes % 128 == 0 && kBarriersAt % 8 == 0, "layout");
constexpr int kNone = -1;

// What a CTA does: 16 V rows of a head of a sequence, the first fastest.
constexpr int kParts = kHead / kRows;
__host__ __device__ __forceinline__ int64_t unit_count(const PrefillParams& p, const Plan& plan) { return int64_t(p.num_seqs) * plan.heads * kParts; }

// Of the ring of transitions: how many have been asked for, and multiplied with.
struct Ring {
  uint32_t asked, used;
};

// A unit of a sequence that is split. The CTA together.
__device__ __forceinline__ void scan_rows(uint8_t* shared, Ring& ring, const PrefillParams& p, const Plan& plan, int64_t unit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row0 = int(unit % kParts) * kRows, h = plan.first_head + int(unit / kParts % plan.heads), index = int(unit / kParts / plan.heads);
  const Sequence sequence = get_sequence(p, index);
  auto* const full = reinterpret_cast<uint64_t*>(shared + kBarriersAt);
  const int64_t first = sequence.slot(index, int64_t(plan.path.segment) * kChunk);
  const int count = int((sequence.chunks + plan.path.segment - 1) / plan.path.segment);
  const int64_t step = int64_t(plan.heads) * (2 * kHead * kHead);  // from segment to segment

  // Segments whose transition is not zero. Of the 32 from `base` on: all, `these`, and those not asked for yet, `waiting`; of the 32 before, `before`; of
  // the 32 behind this lane's, `ahead`, on its way. All segments but the first and the last have a transition.
  const int32_t* const flags = plan.nonzero + first * plan.heads + h - plan.first_head;
  const auto flag = [&](int j) { return j >= 1 && j < count - 1 ? flags[int64_t(j) * plan.heads] : 0; };
  const int32_t now = flag(lane);
  int32_t ahead = flag(32 + lane);
  int base = 0;
  uint32_t before = 0, these, waiting;
  // At segment j: the next of them; not further than the 32 behind those that j is of.
  const auto find_next = [&](int j) {
    if (waiting == 0 && base <= j) {
      base += 32;
      before = these;
      these = waiting = __ballot_sync(0xffffffffu, ahead != 0);
      ahead = flag(base + 32 + lane);
    }
    const int next = waiting != 0 ? base + __popc((waiting & -waiting) - 1) : kNone;
    waiting &= waiting - 1;
    return next;
  };

  // This thread's elements of states: of rows g and g + 8, four columns from `column` on.
  const int half = warp / 4, column = 32 * (warp % 4) + q / 2 * 16 + half * 8 + q % 2 * 4;
  float* const place0 = plan.segment_state(first, h, 0) + (row0 + g) * kHead + column;
  const auto place = [&](int j) { return place0 + j * step; };
  float* const locals = reinterpret_cast<float*>(shared) + kStages * kStageFloats + 4 * threadIdx.x;
  const auto local_at = [&](int j) { return locals + j % kLocals * kLocalFloats; };
  const auto fetch_local = [&](int j) {
    if (j < count - 1) {
#pragma unroll
      for (int i = 0; i < 2; i++) copy_async(local_at(j) + i * 4 * kThreads, place(j) + 8 * i * kHead, true);
    }
  };
  // Transitions come in the order in which they are multiplied with. At segment j: as many as there are stages for.
  float* const transitions = reinterpret_cast<float*>(shared);
  const auto ask = [&](int j) {
    while (ring.asked - ring.used < kStages) {
      const int found = find_next(j);
      if (found == kNone) return;
      const uint32_t stage = ring.asked++ % kStages;
      if (threadIdx.x == 0) {
        barrier_arrive_expect(&full[stage], Transition::bytes);
        bulk_copy(transitions + stage * kStageFloats, plan.segment_state(first, h, 1) + found * step, Transition::bytes, &full[stage]);
      }
    }
  };
  float* const parts = reinterpret_cast<float*>(shared) + kStages * kStageFloats + kLocals * kLocalFloats;
  float* const exchange = parts + 2 * kPart + 4 * lane;

  these = waiting = __ballot_sync(0xffffffffu, now != 0);
  ask(1);
  float4 state[2];
#pragma unroll
  for (int i = 0; i < 2; i++) state[i] = *reinterpret_cast<const float4*>(place(0) + 8 * i * kHead);
  // A turn of the loop ends with a commit, and these are the kLocals - 1 before the first.
#pragma unroll
  for (int j = 1; j < kLocals; j++) {
    fetch_local(j);
    copy_commit();
  }

  for (int j = 1;; j++) {
    copy_wait<kLocals - 2>();
    float4 local[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      local[i] = *reinterpret_cast<const float4*>(local_at(j) + i * 4 * kThreads);
      *reinterpret_cast<float4*>(place(j) + 8 * i * kHead) = state[i];
    }
    if (j == count - 1) return;
    if (((j >= base ? these : before) >> j % 32 & 1) != 0) {
      const float* const transition = transitions + ring.used % kStages * kStageFloats;
      barrier_wait(&full[ring.used % kStages], ring.used / kStages % 2);
      const float4 factors = *reinterpret_cast<const float4*>(transition + Transition::factors_at / 4 + column);
      const float values[4][2] = {{state[0].x * factors.x, state[1].x * factors.x}, {state[0].y * factors.y, state[1].y * factors.y},
                                  {state[0].z * factors.z, state[1].z * factors.z}, {state[0].w * factors.w, state[1].w * factors.w}};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t x[4], y[4];
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const float value = values[2 * i + m / 2][m % 2];
          x[m] = round_to_tf32(value) & 0xffffe000u;  // what a product reads of it
          y[m] = round_to_tf32(value - __uint_as_float(x[m]));
        }
        float* to = parts + g * kStride + 2 * (column + 2 * i);
        *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
        *reinterpret_cast<uint4*>(to + kPart) = make_uint4(y[0], y[1], y[2], y[3]);
      }
      __syncthreads();  // the state is there, and what was exchanged before has been read
      float large[4][4] = {}, small[4][4] = {};
      const float* const left = parts + g * kStride + 2 * (64 * half + 4 * q);
#pragma unroll
      for (int block = 0; block < 4; block++) {
        uint4 right[2];
#pragma unroll
        for (int k = 0; k < 2; k++) right[k] = *reinterpret_cast<const uint4*>(transition + Transition::piece(64 * half + 16 * block + 2 * k, 8 * (warp % 4)) / 4 + 4 * lane);
        uint32_t a[2][4], a_low[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const uint4 x = *reinterpret_cast<const uint4*>(left + 2 * (16 * block + 2 * k));
          const uint4 y = *reinterpret_cast<const uint4*>(left + 2 * (16 * block + 2 * k) + kPart);
          a[k][0] = x.x, a[k][1] = x.y, a[k][2] = x.z, a[k][3] = x.w;
          a_low[k][0] = y.x, a_low[k][1] = y.y, a_low[k][2] = y.z, a_low[k][3] = y.w;
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float2 rows[2][2] = {{Pair<__half>::unpack(right[k].x), Pair<__half>::unpack(right[k].y)},
                                     {Pair<__half>::unpack(right[k].z), Pair<__half>::unpack(right[k].w)}};
          uint32_t b[4][2];
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) b[n][i] = __float_as_uint(n % 2 == 0 ? rows[i][n / 2].x : rows[i][n / 2].y);
#pragma unroll
          for (int n = 0; n < 4; n++) mma_tf32(large[n], a[k], b[n][0], b[n][1]);
#pragma unroll
          for (int n = 0; n < 4; n++) mma_tf32(small[n], a_low[k], b[n][0], b[n][1]);
        }
      }
      // Of the two fours of columns one is the other half's to add.
      float4 mine[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 x[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const auto sum = [&](int n, int at) { return large[2 * m + n][2 * i + at] + small[2 * m + n][2 * i + at]; };
          x[m] = make_float4(sum(0, 0), sum(1, 0), sum(0, 1), sum(1, 1));
        }
        mine[i] = half == 0 ? x[0] : x[1];
        *reinterpret_cast<float4*>(exchange + (2 * warp + i) * 128) = half == 0 ? x[1] : x[0];
      }
      __syncthreads();  // what is exchanged is there, and the state and the transition have been read
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float4 x = *reinterpret_cast<const float4*>(exchange + (2 * (warp ^ 4) + i) * 128);
        local[i].x += mine[i].x + x.x, local[i].y += mine[i].y + x.y, local[i].z += mine[i].z + x.z, local[i].w += mine[i].w + x.w;
      }
      ring.used++;
    }
    ask(j);
    fetch_local(j + kLocals - 1);
    copy_commit();
#pragma unroll
    for (int i = 0; i < 2; i++) state[i] = local[i];
  }
}

// As many CTAs as there are multiprocessors, or units if these are fewer. Most sequences of a batch may not be split, so each lane looks at another unit.
__global__ void __launch_bounds__(kThreads, 1) scan(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan) {
  GDN_SHARED(shared);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(reinterpret_cast<uint64_t*>(shared + kBarriersAt) + i, 1);
    barrier_init_done();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int64_t units = unit_count(p, plan);
  Ring ring{0, 0};
  bool waited = false;
  for (int64_t from = blockIdx.x; from < units; from += 32 * int64_t(gridDim.x)) {
    uint32_t split = __ballot_sync(0xffffffffu, is_split(p, (from + int64_t(lane) * gridDim.x) / kParts / plan.heads, plan.path.segment));
    if (!waited) wait_for_previous();  // also where there is nothing to do: what comes behind takes this kernel's end for that of those before
    waited = true;
    for (; split != 0; split &= split - 1) scan_rows(shared, ring, p, plan, from + int64_t(__ffs(int(split)) - 1) * gridDim.x);
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
  const int64_t units = unit_count(p, plan), grid = units < plan.multiprocessors ? units : plan.multiprocessors;
  GDN_LAUNCH_BEHIND(scan, unsigned(grid), kThreads, kBytes, stream, p, plan);
  check(cudaGetLastError(), "prefill on sm_90a, scan");
}

}  // namespace sm90
}  // namespace gdn
#endif
