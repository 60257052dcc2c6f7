// Which plan a call of sm90_decode.cu takes. benchmarks/check_decode.py times them all.
#pragma once
#include "sm90_decode.h"

namespace gdn {

constexpr DecodePlan kDecodePlans[] = {
    // tile wide warps streaming cached
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
    {4096, true, 1, false, true},  // 11 (of float32 with late stores)
};
constexpr int kDecodePlanCount = sizeof(kDecodePlans) / sizeof(kDecodePlans[0]);

// No plan: launch_decode_sm90 leaves the call to decode.cu.
constexpr int kDecodePortable = 0;

// Measured on an H200 (python benchmarks/check_decode.py --only times; TB/s of state read and written, 16/64 heads and 32, 128 and 256
// sequences; a copy within the pool 3.96, 4.15, 4.19 for float32 and 3.81, 4.13, 4.19 for bfloat16):
//   float32    plan 2: 3.72, 3.91, 3.97; loads by way of L1: 3.77, 4.00, 4.06; and late stores (plan 11): 3.80, 4.01, 4.07
//   bfloat16   plan 2: 3.43, 3.78, 3.88; loads by way of L1 (plan 11): 3.45, 3.84, 3.94
// Below, narrow rows win (float32, 8 sequences: 23.1 us against 23.5). The smallest calls are bound by latency: float32 8.3 us with
// decode.cu and 8.8 here (16/64, one sequence), bfloat16 6.4 with decode.cu and 6.8 with tiles of 1 KB (2/8, one sequence). Tried
// and slower: 2 and 8 KB, more warps a CTA, the copy engine, fewer CTAs at a time, L2 policies, prefetching other sequences' tiles.
// Neighbouring CTAs on neighbouring sequences gave bfloat16 and 32 sequences 3.58 there, but 3.22 with rows anywhere in a pool (bench).
inline int decode_plan(int64_t state_bytes, int /*state_size*/, int multiprocessors) {
  const int64_t each = state_bytes / multiprocessors;
  if (each <= 32 << 10) return kDecodePortable;
  return each <= 400 << 10 ? 1 : 11;
}

}  // namespace gdn
