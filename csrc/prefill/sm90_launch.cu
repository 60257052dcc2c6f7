// Prefill on sm_90a: which kernels run, and in what memory. Three ways to fill the card, chosen on the host from shapes alone
// (backends/cuda/prefill_heuristics.py):
//
//   whole heads     chunks, recurrence                          a CTA a sequence and head
//   V rows split    the same, a CTA for half the V rows of a head
//   sequence split  chunks, first pass, scan, recurrence        as either, for each segment of a sequence
//
// In the first pass each segment but a sequence's last finds the state that it would reach from nothing, and its transition;
// a first segment starts from the true state instead, and needs no transition. The scan turns these into the states that the
// segments start from. The second pass is the recurrence as it always is, checkpoints and final states included.
#include <algorithm>
#include <numeric>

#include "../common/device.h"
#include "sm90_workspace.cuh"

#ifdef GDN_EMULATE
#include "emulate_sm90.h"
#elif GDN_SM90
#include <cuda.h>

namespace gdn {
namespace {

// Of a tensor [tokens, heads, 128] of 16 bits with strides in bytes; boxes as tensor_copy has them, of so many tokens. False if the driver refuses, or
// knows no tensor maps. Its function is looked up through the runtime: nothing here links the driver's library.
bool make_tensor_map(TensorMap& map, const void* data, int64_t heads, int64_t tokens, int64_t head_stride, int64_t token_stride, int box_tokens) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap), "the driver's");
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();  // or a later check would find it
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[3] = {128, cuuint64_t(heads), cuuint64_t(tokens)}, strides[2] = {cuuint64_t(head_stride), cuuint64_t(token_stride)};
  const cuuint32_t box[3] = {64, 1, cuuint32_t(box_tokens)}, steps[3] = {1, 1, 1};
  return encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace
}  // namespace gdn
#endif

namespace gdn {
namespace sm90 {
namespace {

// Long prompts with many heads go by several passes over heads rather than take more scratch than this.
constexpr int64_t kScratch = int64_t(3) << 30;

int64_t slot_count(const PrefillParams& p, int64_t chunks) { return p.num_tokens / (kChunk * chunks) + 2 * int64_t(p.num_seqs); }
int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Path path_of(const PrefillParams& p) { return {p.sm90_rows, p.sm90_segment, p.sm90_half}; }

#if GDN_SM90
// The map of q, k, v or output, if the copy engine can take it in place. Encoded once for the tensors that a thread has seen last: a call asks
// twice, for its scratch and for its launch.
bool tensor_map(TensorMap& map, const void* data, const Strides3& stride, int64_t heads, int64_t tokens, int box_tokens) {
  struct Known {
    const void* data;
    int64_t head_stride, token_stride, heads, tokens;
    int box_tokens;
    bool good;
    TensorMap map;
  };
  // In bytes. A dimension of one element has any stride; what is repeated is left to the first kernel.
  const int64_t head_stride = heads > 1 ? stride.head * 2 : 2 * kHead, token_stride = tokens > 1 ? stride.token * 2 : 2 * kHead;
  if (head_stride <= 0 || token_stride <= 0 || tokens < 1 || tokens > INT32_MAX - 2 * kChunk) return false;
  constexpr int kKnown = 32;  // of eight calls
  thread_local Known known[kKnown] = {};
  thread_local int oldest = 0;
  for (const Known& x : known)
    if (x.data == data && x.head_stride == head_stride && x.token_stride == token_stride && x.heads == heads && x.tokens == tokens && x.box_tokens == box_tokens) {
      map = x.map;
      return x.good;
    }
  Known& x = known[oldest];
  oldest = (oldest + 1) % kKnown;
  x.data = data, x.head_stride = head_stride, x.token_stride = token_stride, x.heads = heads, x.tokens = tokens, x.box_tokens = box_tokens;
  x.good = make_tensor_map(x.map, data, heads, tokens, head_stride, token_stride, box_tokens);
  map = x.map;
  return x.good;
}
#endif

// Whether the copy engine can read q and k where they are: maps[0], of k, and maps[1], of q.
bool map_tiles(const PrefillParams& p, TensorMap* maps, int box_tokens) {
#if GDN_SM90
  return p.k_aligned && p.q_aligned && p.num_tokens >= kChunk && tensor_map(maps[0], p.k, p.k_stride, p.heads / p.k_group, p.num_tokens, box_tokens) &&
         tensor_map(maps[1], p.q, p.q_stride, p.heads / p.q_group, p.num_tokens, box_tokens);
#else
  return false;
#endif
}

// Whether the recurrence does so, with maps of its own: operands are of the inputs' own type. Not where q and k are normalised, since that rounds them
// to their type, which no factor beside the products can do.
bool reads_in_place(const PrefillParams& p, const Path& path, TensorMap* groups) {
  return !p.l2norm && (p.dtype == DType::f16 || !path.half) && map_tiles(p, groups, 16);
}

struct Sizes {
  int64_t slots, segments;
  int32_t heads;  // of a pass: whole groups of q and k heads
  int64_t records, q_tiles, k_tiles, states, nonzero, dealt;

  Sizes(const PrefillParams& p, const Path& path, bool raw)
      : slots(slot_count(p, 1)), segments(path.segment > 0 ? slot_count(p, path.segment) : 0) {
    const int64_t unit = std::lcm(p.q_group, p.k_group);
    const int64_t a_head = slots * kRecordBytes + segments * 2 * kHead * kHead * 4;
    heads = int32_t(std::min<int64_t>(p.heads, std::max<int64_t>(kScratch / a_head / unit * unit, unit)));
    records = rounded(slots * heads * kRecordBytes);
    const int64_t tiles = raw ? 2 * int64_t(p.num_seqs) : slots;
    q_tiles = tiles * (p.heads / p.q_group) * int64_t(kTileBytes);
    k_tiles = tiles * (p.heads / p.k_group) * int64_t(kTileBytes);
    states = segments * heads * 2 * kHead * kHead * 4;
    nonzero = rounded(segments * heads * 4);
    dealt = 256;
  }
  int64_t total() const { return records + q_tiles + k_tiles + states + nonzero + dealt; }
};

#if GDN_SM90
// Whether one kernel can do it: all that comes and goes is what the copy engine can take.
bool plan_pairs(const PrefillParams& p, PairPlan& plan) {
  if (!p.sm90_pairs || p.sm90_half || p.sm90_segment != 0 || p.dtype != DType::bf16 || !p.q_aligned || !p.k_aligned || !p.v_aligned) return false;
  return tensor_map(plan.q, p.q, p.q_stride, p.heads / p.q_group, p.num_tokens, 16) &&
         tensor_map(plan.k, p.k, p.k_stride, p.heads / p.k_group, p.num_tokens, 16) &&
         tensor_map(plan.v, p.v, p.v_stride, p.heads / p.v_group, p.num_tokens, kChunk) &&
         tensor_map(plan.output, p.output, p.output_stride, p.heads, p.num_tokens, kChunk);
}
#endif

}  // namespace

bool serves(const PrefillParams& p) {
  return GDN_SM90 && p.head_size_k == kHead && p.head_size_v == kHead && (p.sm90_rows == kHead || p.sm90_rows == kHead / 2);
}

int64_t workspace(const PrefillParams& p) {
#if GDN_SM90
  PairPlan plan;
  if (plan_pairs(p, plan)) return 0;
#endif
  TensorMap maps[2], groups[2];
  const Path path = path_of(p);
  return Sizes(p, path, map_tiles(p, maps, kChunk) && reads_in_place(p, path, groups)).total();
}

#if GDN_SM90
void launch(const PrefillParams& p, cudaStream_t stream) {
  PairPlan pairs{};
  if (plan_pairs(p, pairs)) return launch_pairs(p, pairs, stream);
  const Path path = path_of(p);
  Plan plan{};
  plan.path = path;
  plan.mapped = map_tiles(p, plan.maps, kChunk);
  plan.raw = plan.mapped && reads_in_place(p, path, plan.groups);
  const Sizes sizes(p, path, plan.raw);
  plan.slots = sizes.slots, plan.segments = sizes.segments;
  plan.output_aligned = (reinterpret_cast<uintptr_t>(p.output) | uintptr_t(p.output_stride.token) * 2 | uintptr_t(p.output_stride.head) * 2) % 16 == 0;
  const auto can_be_copied = [](const States& states) { return states.data == nullptr || (states.dtype == DType::f32 && states.aligned); };
  plan.staged = can_be_copied(p.initial) && can_be_copied(p.final);
  const auto wide = [](const void* data, const Strides3& stride, DType dtype) {
    const int size = dtype == DType::f32 ? 4 : 2;
    return data == nullptr || (stride.head == 1 && stride.token % 4 == 0 && reinterpret_cast<uintptr_t>(data) % (4 * size) == 0);
  };
  const bool wide_gates = (p.gate == Gate::none || wide(p.g, p.g_stride, p.g_dtype)) && wide(p.beta, p.beta_stride, p.beta_dtype);
  plan.multiprocessors = multiprocessors();
  plan.tokens_a_slot = float(p.num_tokens) / float(plan.slots);
  plan.records = static_cast<char*>(p.workspace);
  plan.q_tiles = plan.records + sizes.records;
  plan.k_tiles = plan.q_tiles + sizes.q_tiles;
  plan.states = reinterpret_cast<float*>(plan.k_tiles + sizes.k_tiles);
  plan.nonzero = reinterpret_cast<int32_t*>(plan.k_tiles + sizes.k_tiles + sizes.states);
  plan.dealt = reinterpret_cast<uint32_t*>(plan.nonzero) + sizes.nonzero / 4;
  for (plan.first_head = 0; plan.first_head < p.heads; plan.first_head += sizes.heads) {
    plan.heads = std::min(sizes.heads, p.heads - plan.first_head);
    // As many heads a CTA, a warp each, as share their q and k.
    const int sharing = std::gcd(p.q_group, p.k_group);
    plan.heads_a_block = sharing % 4 == 0 ? 4 : sharing % 3 == 0 ? 3 : sharing % 2 == 0 ? 2 : 1;
    plan.wide_gates = plan.heads_a_block == 4 && wide_gates;
    plan.few = plan.slots * (plan.heads / plan.heads_a_block) <= 4 * plan.multiprocessors;
    launch_chunks(p, plan, stream);
    if (path.segment > 0) {
      launch_segments(p, plan, stream);
      launch_scan(p, plan, stream);
    }
    launch_recurrence(p, plan, stream);
  }
}
#else
void launch(const PrefillParams&, cudaStream_t) {}  // serves() says no
#endif

}  // namespace sm90
}  // namespace gdn
