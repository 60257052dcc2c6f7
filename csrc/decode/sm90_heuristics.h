// Which plan a call of sm90_decode.cu takes. benchmarks/check_decode.py times them all.
#pragma once
#include "sm90_decode.h"

namespace gdn {

constexpr DecodePlan kDecodePlans[] = {
    //                       tile  stages warps resident waves policy
    {DecodeKind::ring_bulk, 4096, 4, 12, 1, 1, 1},  //  1
    {DecodeKind::ring_bulk, 4096, 6, 8, 1, 1, 1},   //  2
    {DecodeKind::ring_bulk, 8192, 4, 6, 1, 1, 1},   //  3
    {DecodeKind::ring_bulk, 4096, 4, 4, 3, 4, 1},   //  4
    {DecodeKind::ring, 4096, 4, 12, 1, 1, 1},       //  5
    {DecodeKind::ring, 4096, 3, 16, 1, 1, 1},       //  6
    {DecodeKind::ring, 4096, 2, 16, 1, 1, 1},       //  7
    {DecodeKind::ring, 8192, 3, 8, 1, 1, 1},        //  8
    {DecodeKind::ring, 4096, 3, 4, 4, 4, 1},        //  9
    {DecodeKind::registers, 4096, 0, 4, 3, 1, 1},   // 10
    {DecodeKind::registers, 4096, 0, 4, 3, 4, 1},   // 11
    {DecodeKind::registers, 2048, 0, 4, 4, 1, 1},   // 12
    {DecodeKind::single, 4096, 0, 4, 0, 0, 1},      // 13
    {DecodeKind::single, 4096, 0, 1, 0, 0, 1},      // 14
    {DecodeKind::single, 2048, 0, 4, 0, 0, 1},      // 15
    {DecodeKind::single, 2048, 0, 1, 0, 0, 1},      // 16
    {DecodeKind::single, 1024, 0, 2, 0, 0, 1},      // 17 (16-bit states)
};
constexpr int kDecodePlanCount = sizeof(kDecodePlans) / sizeof(kDecodePlans[0]);

// Tiles of 4 KB, one a warp; also where a ring does not fit into shared memory.
constexpr int kDecodeWithoutRing = 14;
// No plan: launch_decode_sm90 leaves the call to decode.cu.
constexpr int kDecodePortable = 0;

// Measured on an H200 (python benchmarks/check_decode.py): a warp a tile of 4 KB, one warp a CTA, is the best or within 3% of
// it wherever there is work for the card (16/64 heads, 256 sequences: float32 549 us, bfloat16 283 us, where the rings of the
// copy engine take 562 to 618 and 298 to 327). The smallest calls are bound by latency: float32 8.5 us with decode.cu and 8.9
// here (16/64, one sequence), bfloat16 6.9 with tiles of 1 KB and 7.0 with decode.cu (2/8, one sequence).
inline int decode_plan(int64_t state_bytes, int state_size, int multiprocessors) {
  const int64_t each = state_bytes / multiprocessors;
  if (each <= 4 << 10 && state_size == 2) return 17;
  if (each <= 32 << 10) return kDecodePortable;
  return kDecodeWithoutRing;
}

}  // namespace gdn
