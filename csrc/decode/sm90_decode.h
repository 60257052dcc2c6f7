// Decode of one token a sequence on sm_90: the launch, for decode.cu, and the plans it may take.
#pragma once
#include "../common/params.h"

namespace gdn {

// How the rows of a call are dealt out: a warp a tile of rows of one state head, contiguous in memory.
struct DecodePlan {
  int tile_bytes;  // for K = 128; a head of 64 columns has tiles of its own
  bool wide;       // a load takes 512 contiguous bytes, not four rows by 128
  int warps;       // a CTA
  bool streaming;  // stores
  bool cached = false;  // loads go by way of L1
};

constexpr int kDecodeByHeuristics = 0;

// False: the call is for decode.cu. `variant` is kDecodeByHeuristics, or one plus a plan's place in the table of
// sm90_heuristics.h, plus 100 for plain stores and 200 for streaming ones whatever the plan says: for benchmarks and tests.
bool launch_decode_sm90(const DecodeParams& params, int multiprocessors, cudaStream_t stream, int variant);

}  // namespace gdn
