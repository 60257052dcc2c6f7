// Decode by a variant that the caller chooses, for tests and benchmarks: in the place of the library's launch_decode, with
// decode.cu compiled to be launch_decode_portable (-Dlaunch_decode=..., -Dlaunch_decode_sm90=launch_decode_never). A
// library of bindings.cu, decode and page slots only, since the prefill takes long to compile.
#include "common/device.h"
#include "decode/sm90_decode.h"
#include "decode/sm90_heuristics.h"

namespace gdn {

void launch_decode_portable(const DecodeParams& params, cudaStream_t stream);
bool launch_decode_never(const DecodeParams&, int, cudaStream_t, int) { return false; }

namespace {
int variant = -1, served = 0;
}

void launch_decode(const DecodeParams& params, cudaStream_t stream) {
  served = variant >= 0 && launch_decode_sm90(params, multiprocessors(), stream, variant);
  if (!served) launch_decode_portable(params, stream);
}

void launch_prefill(const PrefillParams&, cudaStream_t) { throw CudaError("this library has no prefill"); }
int64_t prefill_workspace(const PrefillParams&) { return 0; }

}  // namespace gdn

#define GDN_EXPORT extern "C" __attribute__((visibility("default")))
// -1: decode.cu; else as launch_decode_sm90 takes it.
GDN_EXPORT void gdn_force_decode(int variant) { gdn::variant = variant; }
// Whether launch_decode_sm90 served the last call.
GDN_EXPORT int gdn_forced_decode_served() { return gdn::served; }
GDN_EXPORT int gdn_decode_plans() { return gdn::kDecodePlanCount; }
// The variant that the heuristics choose.
GDN_EXPORT int gdn_decode_plan(long long bytes, int size, int multiprocessors) {
  return gdn::decode_plan(bytes, size, multiprocessors);
}
// tile bytes, wide, warps, streaming, cached
GDN_EXPORT void gdn_describe_decode_plan(int variant, int* out) {
  const gdn::DecodePlan& plan = gdn::kDecodePlans[variant - 1];
  out[0] = plan.tile_bytes, out[1] = plan.wide, out[2] = plan.warps, out[3] = plan.streaming;
  out[4] = plan.cached;
}
