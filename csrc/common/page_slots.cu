// The rows of a whole batch in one launch, for callers that compute them once a step and pass them to every layer.
#include "primitives.cuh"
#include "rows.cuh"

namespace gdn {

__global__ void page_slots(const __grid_constant__ SlotsParams p) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= p.num_seqs) return;
  if (p.cu_seqlens.data == nullptr) {
    const DecodeRows rows = decode_rows(p.pages, b);
    p.read[b] = int32_t(rows.read);
    p.write[b] = int32_t(rows.write);
  } else {
    const int64_t tokens = load_index(p.cu_seqlens, b + 1) - load_index(p.cu_seqlens, b);
    const PrefillRows rows = prefill_rows(p.pages, b, tokens);
    p.read[b] = int32_t(rows.read);
    p.write[b] = int32_t(rows.write);
    p.starts[b] = int32_t(rows.starts);
    p.prefix[b] = int32_t(rows.prefix);
  }
}

void launch_page_slots(const SlotsParams& params, cudaStream_t stream) {
  if (params.num_seqs == 0) return;
  GDN_LAUNCH(page_slots, (params.num_seqs + 127) / 128, 128, 0, stream, params);
  check(cudaGetLastError(), "page_slots");
}

}  // namespace gdn
