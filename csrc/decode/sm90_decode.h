// Decode of one token a sequence on sm_90: the launch, for decode.cu, and the plans it may take.
#pragma once
#include "../common/params.h"

namespace gdn {

// How the rows of a call are dealt out. A tile is 4 * passes rows of one state head, contiguous in memory.
enum class DecodeKind : int32_t {
  ring_bulk,    // tiles pass through shared memory, brought and taken away by the copy engine
  ring,         // brought by the copy engine, stored from registers
  registers,    // a warp asks for its next tile before it works on the present one
  single,       // a warp a tile
};

struct DecodePlan {
  DecodeKind kind;
  int tile_bytes;  // for K = 128; of a head of 64 columns half as many
  int stages;      // of a warp's ring
  int warps;       // a CTA
  int resident;    // CTAs a multiprocessor that the grid is made for (not `single`)
  int waves;       // the grid is this many times as large: 1 is a static schedule, more leaves the balance to the hardware
  int policy;      // of L2: 0 none, 1 what is read is evicted first, 2 what is written too
};

constexpr int kDecodeByHeuristics = 0;

// False: the call is for decode.cu. `variant` is kDecodeByHeuristics, or one plus a plan's place in the table of
// sm90_heuristics.h, plus 100 (policy + 1) to replace its policy: for benchmarks and tests.
bool launch_decode_sm90(const DecodeParams& params, int multiprocessors, cudaStream_t stream, int variant);

}  // namespace gdn
