// Prefill on sm_90a, split sequences, between the passes: the state that each segment starts from,
//     start(1) = end(0),   start(j + 1) = start(j) transition(j) + local(j),
// where end(0) is what the first segment, which knows its initial state, reached. V rows need nothing of each other: a CTA
// takes 16 of them through all segments of a sequence and head, a warp 16 columns. Products are of TF32 in three parts
// (high high, low high, high low), which is float32 but for its last bit or two; a transition that is zero is not read.
#include "sequence.cuh"
#include "sm90_workspace.cuh"

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kRows = 16;
constexpr int kWarps = 8;
constexpr int kStride = kHead + 4;

__global__ void __launch_bounds__(32 * kWarps) scan(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan) {
  GDN_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row0 = blockIdx.x % (kHead / kRows) * kRows;
  const int h = plan.first_head + blockIdx.x / (kHead / kRows) % plan.heads;
  const int index = blockIdx.x / (kHead / kRows) / plan.heads;
  const Sequence sequence = get_sequence(p, index);
  if (sequence.chunks == 0) return;
  const int64_t first = sequence.begin / (int64_t(plan.path.segment) * kChunk) + 2 * int64_t(index);
  const int64_t offset = sequence.prefix / kChunk % plan.path.segment;
  const int count = int((offset + sequence.chunks + plan.path.segment - 1) / plan.path.segment);
  if (count == 1) return;

  // This warp's columns of a transition: b operands of m16n8k8 products.
  float next[16][2][2];
  const auto nonzero = [&](int j) { return plan.nonzero[(first + j) * plan.heads + h - plan.first_head] != 0; };
  const auto fetch = [&](int j) {
    if (j >= count - 1 || !nonzero(j)) return;
    const float* m = plan.segment_state(first + j, h, 1) + q * kHead + 16 * warp + g;
#pragma unroll
    for (int k = 0; k < 16; k++)
#pragma unroll
      for (int n = 0; n < 2; n++) next[k][n][0] = m[8 * k * kHead + 8 * n], next[k][n][1] = m[(8 * k + 4) * kHead + 8 * n];
  };
  const auto place = [&](int j) { return plan.segment_state(first + j, h, 0) + (row0 + g) * kHead + 16 * warp + 2 * q; };
  const auto load = [&](float(&x)[2][4], int j) {
    const float* from = place(j);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 pair = *reinterpret_cast<const float2*>(from + 8 * i * kHead + 8 * n);
        x[n][2 * i] = pair.x, x[n][2 * i + 1] = pair.y;
      }
  };

  float state[2][4];
  load(state, 0);
  fetch(1);
  int products = 0;
  for (int j = 1; j < count; j++) {
    float local[2][4];
    if (j < count - 1) load(local, j);
    float* to = place(j);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *reinterpret_cast<float2*>(to + 8 * i * kHead + 8 * n) = make_float2(state[n][2 * i], state[n][2 * i + 1]);
    if (j == count - 1) return;
    if (nonzero(j)) {
      float* buffer = reinterpret_cast<float*>(shared) + products++ % 2 * kRows * kStride;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          *reinterpret_cast<float2*>(buffer + (g + 8 * i) * kStride + 16 * warp + 8 * n + 2 * q) =
              make_float2(state[n][2 * i], state[n][2 * i + 1]);
      float m[16][2][2];
#pragma unroll
      for (int k = 0; k < 16; k++)
#pragma unroll
        for (int n = 0; n < 2; n++) m[k][n][0] = next[k][n][0], m[k][n][1] = next[k][n][1];
      __syncthreads();  // two buffers: one barrier a product
      fetch(j + 1);
#pragma unroll
      for (int k = 0; k < 16; k++) {
        const float* a = buffer + g * kStride + 8 * k + q;
        const float values[4] = {a[0], a[8 * kStride], a[4], a[8 * kStride + 4]};
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) high[i] = to_tf32(values[i]), low[i] = to_tf32(values[i] - __uint_as_float(high[i]));
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const uint32_t b0 = to_tf32(m[k][n][0]), b1 = to_tf32(m[k][n][1]);
          mma_tf32(local[n], low, b0, b1);
          mma_tf32(local[n], high, to_tf32(m[k][n][0] - __uint_as_float(b0)), to_tf32(m[k][n][1] - __uint_as_float(b1)));
          mma_tf32(local[n], high, b0, b1);
        }
      }
    } else {
      fetch(j + 1);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[n][i] = local[n][i];
  }
}

}  // namespace

void launch_scan(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  const int64_t grid = int64_t(p.num_seqs) * plan.heads * (kHead / kRows);
  GDN_LAUNCH(scan, unsigned(grid), 32 * kWarps, 2 * kRows * kStride * 4, stream, p, plan);
  check(cudaGetLastError(), "prefill on sm_90a, scan");
}

}  // namespace sm90
}  // namespace gdn
#endif
