// The machine: one function an instruction that C++ has no word for, and nothing else. Everything here exists from
// sm_80 on. With GDN_EMULATE the same names come from tests/backends/cuda_emulator, which runs the kernels on a CPU,
// thread by thread: indices, fragment layouts and barriers are tested there without a GPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#ifdef GDN_EMULATE
#include "emulate.h"
#else

#define GDN_LAUNCH(kernel, grid, block, shared, stream, ...) kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#define GDN_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

namespace gdn {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- streams: data that passes once, and should push nothing out of L1 ----------------------------------------------

// Volatile: issued where it stands, before the arithmetic around it.
__device__ __forceinline__ uint4 load_stream(const void* address) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_stream(void* address, const uint4& x) { __stcs(reinterpret_cast<uint4*>(address), x); }

// A line into L2, to be read from there soon.
__device__ __forceinline__ void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// --- copies to shared memory that run on their own -------------------------------------------------------------------

// 16 bytes, or 16 zero bytes when not `valid`: then `from` is not read.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
// An aligned word.
__device__ __forceinline__ void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copy_wait() {  // until at most N groups are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// --- 8x8 tiles of 16-bit elements --------------------------------------------------------------------------------------
// Lane 4 g + p holds elements (g, 2p) and (g, 2p + 1) of a tile; transposed, (2p, g) and (2p + 1, g). Lanes 8 i to 8 i + 7
// give the addresses of the rows of tile i, 16 bytes each.

__device__ __forceinline__ void load_tiles(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_tiles_transposed(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ uint32_t transpose_tile(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// --- products: d += a b ------------------------------------------------------------------------------------------------
// d [16, 8] float32: lane 4 g + p holds (g, 2p), (g, 2p + 1), (g + 8, 2p), (g + 8, 2p + 1).
// a [16, 16]: tiles (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
// b [16, 8]: transposed tiles (rows 0-7), (8-15), so that lane 4 g + p holds rows 2p, 2p + 1 (and + 8) of column g.

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// TF32 keeps 10 bits of the mantissa and float32's range. a [16, 8]: lane 4 g + p holds (g, p), (g + 8, p), (g, p + 4),
// (g + 8, p + 4); b [8, 8]: (p, g), (p + 4, g).
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace gdn
#endif
