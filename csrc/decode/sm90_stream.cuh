// State rows on their way through the chip. Instructions only, as in common/primitives.cuh; with GDN_EMULATE they come from
// tests/backends/cuda_emulator.
#pragma once
#include "../common/primitives.cuh"

#ifdef GDN_EMULATE
#include "emulate_decode.h"
#else

namespace gdn {

// Volatile, so that they are issued where they stand. Nothing is read, and zeros come, when not `valid`: a predicate, since
// a compiler would move all loads that come before a branch on the pool's rows behind it.
template <bool CACHED>  // in L1
__device__ __forceinline__ uint4 load_tile(const void* address, bool valid) {
  uint4 x;
#define GDN_LOAD(modifier)                                                                                         \
  asm volatile(                                                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n" \
      "@p ld.global" modifier ".v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"                                               \
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)                                                             \
      : "l"(address), "r"(int(valid))                                                                              \
      : "memory")
  if constexpr (CACHED)
    GDN_LOAD("");
  else
    GDN_LOAD(".L1::no_allocate");
#undef GDN_LOAD
  return x;
}

// Streaming: to leave L2 early.
__device__ __forceinline__ void store_tile(void* address, const uint4& x, bool streaming) {
  if (streaming)
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
  else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

}  // namespace gdn
#endif
