// Prefill on sm_90a, split sequences, between the passes: the state that each segment starts from,
//     start(1) = end(0),   start(j + 1) = start(j) transition(j) + local(j),
// where end(0) is what the first segment, which knows its initial state, reached. V rows need nothing of each other: a CTA
// takes 16 of them through all segments of a sequence and head, a warp 16 columns. Products are of TF32 in three parts
// (high high, low high, high low), which is float32 but for its last bits; a transition that is zero is not read. Transitions
// are brought two segments ahead.
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
constexpr int kWarps = 8;
constexpr int kStages = 3;
// Floats a row, so that no two lanes of a fragment read fall into one bank: transitions, states.
constexpr int kStride = kHead + 4, kStateStride = kHead + 8;
constexpr int kStageFloats = kHead * kStride;
constexpr int kBytes = (kStages * kStageFloats + 2 * kRows * kStateStride) * 4;

__global__ void __launch_bounds__(32 * kWarps, 1) scan(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan) {
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
  const int64_t offset = sequence.prefix / kChunk % plan.path.segment;
  const int count = int((offset + sequence.chunks + plan.path.segment - 1) / plan.path.segment);
  if (count == 1) return;

  float* transitions = reinterpret_cast<float*>(shared);
  float* states = transitions + kStages * kStageFloats;
  // Whether a segment has a transition, and one that is not zero.
  const auto has_transition = [&](int j) { return j < count - 1 && plan.nonzero[(first + j) * plan.heads + h - plan.first_head] != 0; };
  const auto fetch = [&](int j, bool wanted) {
    if (wanted) {
      const float* from = plan.segment_state(first + j, h, 1) + threadIdx.x / 32 * kHead + lane * 4;
      float* to = transitions + j % kStages * kStageFloats + threadIdx.x / 32 * kStride + lane * 4;
#pragma unroll
      for (int i = 0; i < kHead / kWarps; i++) copy_async(to + i * kWarps * kStride, from + i * kWarps * kHead, true);
    }
    copy_commit();
  };
  // This lane's elements of its warp's 16 columns: column 2 g + n of tile n.
  const auto place = [&](int j) { return plan.segment_state(first + j, h, 0) + (row0 + g) * kHead + 16 * warp + 4 * q; };
  const auto load = [&](float(&x)[2][4], int j) {
    const float* from = place(j);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 y = *reinterpret_cast<const float4*>(from + 8 * i * kHead);
      x[0][2 * i] = y.x, x[1][2 * i] = y.y, x[0][2 * i + 1] = y.z, x[1][2 * i + 1] = y.w;
    }
  };

  float state[2][4], local[2][4];
  bool now = has_transition(1), next = has_transition(2), after = has_transition(3);
  load(state, 0);
  if (count > 2) load(local, 1);
  fetch(1, now);
  fetch(2, next);
  for (int j = 1; j < count; j++) {
    float* to = place(j);
    float* buffer = states + j % 2 * kRows * kStateStride + g * kStateStride + 16 * warp + 4 * q;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 y = make_float4(state[0][2 * i], state[1][2 * i], state[0][2 * i + 1], state[1][2 * i + 1]);
      *reinterpret_cast<float4*>(to + 8 * i * kHead) = y;
      *reinterpret_cast<float4*>(buffer + 8 * i * kStateStride) = y;
    }
    if (j == count - 1) return;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[n][i] = local[n][i];
    if (j + 1 < count - 1) load(local, j + 1);
    const bool multiply = now;
    now = next, next = after, after = has_transition(j + 3);
    copy_wait<1>();
    __syncthreads();  // the transition and the state are there; the stage and the state before are done with
    fetch(j + 2, next);
    if (!multiply) continue;
    // The eight k of a product come in the order 0, 2, 4, 6, 1, 3, 5, 7.
    const float* left = states + j % 2 * kRows * kStateStride + g * kStateStride + 2 * q;
    const float* right = transitions + j % kStages * kStageFloats + 2 * q * kStride + 16 * warp + 2 * g;
#pragma unroll 4
    for (int k = 0; k < 16; k++) {
      const float2 above = *reinterpret_cast<const float2*>(left + 8 * k), below = *reinterpret_cast<const float2*>(left + 8 * k + 8 * kStateStride);
      const float2 even = *reinterpret_cast<const float2*>(right + 8 * k * kStride), odd = *reinterpret_cast<const float2*>(right + (8 * k + 1) * kStride);
      // What a product reads of a float32, and the rest.
      const auto high = [](float x) { return __float_as_uint(x) & 0xffffe000u; };
      const auto low = [&](float x) { return __float_as_uint(x - __uint_as_float(high(x))); };
      const uint32_t a[4] = {high(above.x), high(below.x), high(above.y), high(below.y)};
      const uint32_t a_low[4] = {low(above.x), low(below.x), low(above.y), low(below.y)};
      const uint32_t b[2][2] = {{high(even.x), high(odd.x)}, {high(even.y), high(odd.y)}};
      const uint32_t b_low[2][2] = {{low(even.x), low(odd.x)}, {low(even.y), low(odd.y)}};
#pragma unroll
      for (int n = 0; n < 2; n++) {
        mma_tf32(state[n], a_low, b[n][0], b[n][1]);
        mma_tf32(state[n], a, b_low[n][0], b_low[n][1]);
        mma_tf32(state[n], a, b[n][0], b[n][1]);
      }
    }
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
  GDN_LAUNCH_BEHIND(scan, unsigned(grid), 32 * kWarps, kBytes, stream, p, plan);
  check(cudaGetLastError(), "prefill on sm_90a, scan");
}

}  // namespace sm90
}  // namespace gdn
#endif
