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

#include "sm90_workspace.cuh"

namespace gdn {
namespace sm90 {
namespace {

// Long prompts with many heads go by several passes over heads rather than take more scratch than this.
constexpr int64_t kScratch = int64_t(1) << 30;

int64_t slot_count(const PrefillParams& p, int64_t chunks) { return p.num_tokens / (kChunk * chunks) + 2 * int64_t(p.num_seqs); }
int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

Path path_of(const PrefillParams& p) { return {p.sm90_rows, p.sm90_segment, p.sm90_half}; }

struct Sizes {
  int64_t slots, segments;
  int32_t heads;  // of a pass: whole groups of q and k heads
  int64_t records, q_tiles, k_tiles, states, nonzero, dealt;

  Sizes(const PrefillParams& p, const Path& path)
      : slots(slot_count(p, 1)), segments(path.segment > 0 ? slot_count(p, path.segment) : 0) {
    const int64_t unit = std::lcm(p.q_group, p.k_group);
    const int64_t a_head = slots * kRecordBytes + segments * 2 * kHead * kHead * 4;
    heads = int32_t(std::min<int64_t>(p.heads, std::max<int64_t>(kScratch / a_head / unit * unit, unit)));
    records = rounded(slots * heads * kRecordBytes);
    q_tiles = slots * (p.heads / p.q_group) * int64_t(kTileBytes);
    k_tiles = slots * (p.heads / p.k_group) * int64_t(kTileBytes);
    states = segments * heads * 2 * kHead * kHead * 4;
    nonzero = rounded(segments * heads * 4);
    dealt = 256;
  }
  int64_t total() const { return records + q_tiles + k_tiles + states + nonzero + dealt; }
};

}  // namespace

bool serves(const PrefillParams& p) {
  return GDN_SM90 && p.head_size_k == kHead && p.head_size_v == kHead && (p.sm90_rows == kHead || p.sm90_rows == kHead / 2);
}

int64_t workspace(const PrefillParams& p) { return Sizes(p, path_of(p)).total(); }

#if GDN_SM90
void launch(const PrefillParams& p, cudaStream_t stream) {
  const Path path = path_of(p);
  const Sizes sizes(p, path);
  Plan plan{};
  plan.path = path;
  plan.slots = sizes.slots, plan.segments = sizes.segments;
  plan.output_aligned = (reinterpret_cast<uintptr_t>(p.output) | uintptr_t(p.output_stride.token) * 2 | uintptr_t(p.output_stride.head) * 2) % 16 == 0;
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
