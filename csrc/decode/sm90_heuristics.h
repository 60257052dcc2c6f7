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

// Measured on an H200 (python benchmarks/check_decode.py): plan 1 is the best or within 3% of it wherever there is work for the
// card. The smallest calls are bound by latency: float32 8.4 us with decode.cu and 9.0 here (16/64 heads, one sequence),
// bfloat16 6.9 with tiles of 1 KB and 7.0 with decode.cu (2/8, one sequence).
inline int decode_plan(int64_t state_bytes, int state_size, int multiprocessors) {
  const int64_t each = state_bytes / multiprocessors;
  if (each <= 4 << 10 && state_size == 2) return 9;
  if (each <= 32 << 10) return kDecodePortable;
  return 1;
}

}  // namespace gdn
