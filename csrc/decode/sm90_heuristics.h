// Which plan a call of sm90_decode.cu takes. benchmarks/check_decode.py times them all.
#pragma once
#include "sm90_decode.h"

namespace gdn {

constexpr DecodePlan kDecodePlans[] = {
    // tile wide warps streaming
    {4096, false, 1, false},  // 1
    {4096, true, 1, false},   // 2
    {8192, false, 1, false},  // 3
    {8192, true, 1, false},   // 4
    {2048, false, 1, false},  // 5
    {2048, true, 1, false},   // 6
    {4096, false, 4, false},  // 7
    {4096, true, 4, false},   // 8
    {1024, false, 2, false},  // 9 (of float32 2 KB: no narrow tile is smaller)
    {1024, true, 2, false},   // 10
};
constexpr int kDecodePlanCount = sizeof(kDecodePlans) / sizeof(kDecodePlans[0]);

// No plan: launch_decode_sm90 leaves the call to decode.cu.
constexpr int kDecodePortable = 0;

// Measured on an H200 (python benchmarks/check_decode.py --stores; us): wide rows win from half a megabyte a multiprocessor on
// (16/64 heads, 256 sequences: float32 538 against 546 narrow, bfloat16 276 against 280), narrow ones below (float32, 8
// sequences: 23.1 against 23.5). The smallest calls are bound by latency: float32 8.3 with decode.cu and 8.8 here (16/64, one
// sequence), bfloat16 6.4 with decode.cu and 6.8 with tiles of 1 KB (2/8, one sequence).
inline int decode_plan(int64_t state_bytes, int /*state_size*/, int multiprocessors) {
  const int64_t each = state_bytes / multiprocessors;
  if (each <= 32 << 10) return kDecodePortable;
  return each <= 400 << 10 ? 1 : 2;
}

}  // namespace gdn
