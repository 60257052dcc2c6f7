// State rows on their way through the chip, with a word to L2 about how long to keep them. Instructions only, as in
// common/sm90_primitives.cuh; with GDN_EMULATE they come from tests/backends/cuda_emulator.
#pragma once
#include "../common/sm90_primitives.cuh"

#ifdef GDN_EMULATE
#include "emulate_decode.h"
#else

namespace gdn {

__device__ __forceinline__ uint64_t l2_policy(bool evict_first) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return evict_first ? first : normal;
}

// Volatile, so that they are issued where they stand. Nothing is read, and zeros come, when not `valid`: a predicate, since
// a compiler would move all loads that come before a branch on the pool's rows behind it.
__device__ __forceinline__ uint4 load_stream(const void* address, uint64_t policy, bool valid) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n}\n"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(address), "l"(policy), "r"(int(valid))
      : "memory");
  return x;
}
__device__ __forceinline__ void store_stream(void* address, const uint4& x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// Bulk stores of a thread since its last commit make a group; `from` may be written again, or the CTA end, when the
// group has been read.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void bulk_wait_read() {  // until at most N groups have not been read
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

}  // namespace gdn
#endif
