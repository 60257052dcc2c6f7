// Which kernels a prefill runs, and how it is cut up. The portable path is two launches, chunks.cu and recurrence.cu,
// because the parallelism changes between them: the 64x64 work of a chunk waits for nothing and fills the card however few
// heads there are; the recurrence is serial in the chunks of a sequence, and fills the card by heads and V rows. Made in one
// kernel, the V shares of a head would each repeat the 64x64 work. The price is 11 KB a chunk and head, written and read.
//
// Paths for one architecture, and paths that split a sequence, are picked here.
#include <algorithm>
#include <numeric>

#include "../common/device.h"
#include "sm90_workspace.cuh"
#include "workspace.h"

namespace gdn {

int64_t recurrence_shared_bytes(int head_size_k, int rows);

namespace {

// Long prompts with many heads go by several passes over heads rather than take more scratch than this.
constexpr int64_t kScratch = int64_t(512) << 20;

int64_t slot_count(const PrefillParams& p) { return p.num_tokens / kChunk + 2 * int64_t(p.num_seqs); }

// Heads of one pass: whole groups of q and k heads.
int heads_a_pass(const PrefillParams& p) {
  const int unit = std::max(p.q_group, p.k_group);
  const int64_t fit = kScratch / (slot_count(p) * kSlotBytes) / unit * unit;
  return int(std::min<int64_t>(p.heads, std::max<int64_t>(fit, unit)));
}

bool packed_q(const PrefillParams& p) { return p.l2norm || !p.q_aligned; }
bool packed_k(const PrefillParams& p) { return p.l2norm || !p.k_aligned; }
int64_t tile_bytes(const PrefillParams& p) { return kChunk * p.head_size_k * 2; }

}  // namespace

int64_t prefill_workspace(const PrefillParams& p) {
  if (p.fused_rows > 0) return 0;
  if (sm90::serves(p)) return sm90::workspace(p);
  const int64_t slots = slot_count(p);
  return slots * (heads_a_pass(p) * int64_t(kSlotBytes) + (packed_q(p) ? p.heads / p.q_group * tile_bytes(p) : 0) +
                  (packed_k(p) ? p.heads / p.k_group * tile_bytes(p) : 0));
}

void launch_prefill(const PrefillParams& p, cudaStream_t stream) {
  if (p.fused_rows > 0) return launch_fused(p, stream);
  if (sm90::serves(p)) return sm90::launch(p, stream);
  PrefillPlan plan{};
  plan.slots = slot_count(p);
  plan.packed_q = packed_q(p), plan.packed_k = packed_k(p);
  const int a_pass = heads_a_pass(p);
  plan.chunks = static_cast<char*>(p.workspace);
  plan.q_tiles = plan.chunks + plan.slots * a_pass * kSlotBytes;
  plan.k_tiles = plan.q_tiles + (plan.packed_q ? plan.slots * (p.heads / p.q_group) * tile_bytes(p) : 0);
  for (plan.first_head = 0; plan.first_head < p.heads; plan.first_head += a_pass) {
    plan.heads = std::min(a_pass, p.heads - plan.first_head);

    // As many heads a CTA as share their q and k, while there is work for every multiprocessor.
    const int sharing = std::gcd(p.q_group, p.k_group);
    plan.heads_a_block = 1;
    for (int n = 4; n > 1; n--)
      if (sharing % n == 0 && plan.slots * (plan.heads / n) >= 4 * int64_t(multiprocessors())) {
        plan.heads_a_block = n;
        break;
      }
    launch_chunks(p, plan, stream);

    // As many V rows a CTA as leave one for (nearly) every multiprocessor.
    plan.rows = p.head_size_v;
    while (plan.rows > 16 && int64_t(p.num_seqs) * plan.heads * (p.head_size_v / plan.rows) * 10 < 9 * int64_t(multiprocessors()))
      plan.rows /= 2;
    const int64_t bytes = recurrence_shared_bytes(p.head_size_k, plan.rows);
    plan.stages = 2 * bytes <= shared_bytes_at_most() ? 2 : 1;
    launch_recurrence(p, plan, stream);
  }
}

}  // namespace gdn
