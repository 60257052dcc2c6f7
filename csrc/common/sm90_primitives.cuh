// The machine from sm_90a on: barriers in shared memory, bulk copies, products of a warpgroup. As in primitives.cuh: one
// function an instruction, and with GDN_EMULATE the same names come from tests/backends/cuda_emulator.
#pragma once
#include "primitives.cuh"
#include "tensor_map.h"

#ifdef GDN_EMULATE
#include "emulate_sm90.h"
#else

namespace gdn {

// --- kernels behind one another ------------------------------------------------------------------------------------------
// A kernel launched by GDN_LAUNCH_BEHIND may start while the one before it still runs, once all its CTAs have let it by
// let_next_start; by wait_for_previous it waits for that one's end and can see all it wrote. Every CTA calls both, so that the
// end of a kernel means the end of all before it.

#define GDN_LAUNCH_BEHIND(kernel, grid, block, shared, stream, ...)             \
  do {                                                                          \
    cudaLaunchAttribute early{};                                                \
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;              \
    early.val.programmaticStreamSerializationAllowed = 1;                       \
    cudaLaunchConfig_t config{};                                                \
    config.gridDim = dim3(grid), config.blockDim = dim3(block);                 \
    config.dynamicSmemBytes = shared, config.stream = stream;                   \
    config.attrs = &early, config.numAttrs = 1;                                 \
    check(cudaLaunchKernelEx(&config, kernel, __VA_ARGS__), "cudaLaunchKernelEx"); \
  } while (false)
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- numbers -------------------------------------------------------------------------------------------------------------

// 2^x to two units of the last place; what is no normal float32 becomes 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To TF32 in one instruction: a product ignores the bits below. Infinities stay; a NaN may become anything.
__device__ __forceinline__ uint32_t round_to_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// Two fp16: the larger absolute values, where they are numbers.
__device__ __forceinline__ uint32_t larger_halves(uint32_t x, uint32_t y) {
  const __half2 z = __hmax2(__habs2(*reinterpret_cast<__half2*>(&x)), __habs2(*reinterpret_cast<__half2*>(&y)));
  return *reinterpret_cast<const uint32_t*>(&z);
}

// --- barriers in shared memory -----------------------------------------------------------------------------------------
// A barrier's phase ends when the announced number of arrivals has come and all announced bytes have landed.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes the initialisation visible to the copy engine too; before a __syncthreads.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// One of the announced arrivals, made when this thread's copy_async so far have landed.
__device__ __forceinline__ void barrier_arrive_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// A warp's arrival, one of its lanes' behind what all have done. racecheck does not follow that order through a barrier: with
// -DGDN_SM90_EACH_LANE every lane arrives for itself (benchmarks/sanitize.py --each-lane).
#ifdef GDN_SM90_EACH_LANE
constexpr int kWarpArrivals = 32;
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) { barrier_arrive(barrier); }
#else
constexpr int kWarpArrivals = 1;
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
#endif
// Until the phase of that parity has ended. A fresh barrier's phase before the first, parity 1, counts as ended. `by_peer`: what the other CTA's
// threads have arrived at (pairs of CTAs, below).
template <bool by_peer = false>
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  const uint32_t address = shared_address(barrier);
#define GDN_TRY_WAIT(scope)                                                                                                            \
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire." scope ".shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n" \
               : "=r"(ended)                                                                                                           \
               : "r"(address), "r"(parity)                                                                                             \
               : "memory")
#ifdef GDN_SM90_DEBUG
  // Gives up: wrong results instead of a hang. No trap and no printf: either makes the assembler run wgmma one at a time.
  for (int tries = 0; tries < 1 << 15; tries++) {
#else
  for (;;) {
#endif
    uint32_t ended;
    if constexpr (by_peer)
      GDN_TRY_WAIT("cluster");
    else
      GDN_TRY_WAIT("cta");
    if (ended) return;
  }
#undef GDN_TRY_WAIT
}
// Whether it has ended.
__device__ __forceinline__ uint32_t barrier_ended(uint64_t* barrier, int parity) {
  uint32_t ended;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}

// --- pairs of CTAs ---------------------------------------------------------------------------------------------------------
// Two CTAs that run at the same time and reach each other's shared memory. What the other has of the same name is at the same address there.

#define GDN_LAUNCH_PAIRS(kernel, grid, block, shared, stream, ...)              \
  do {                                                                          \
    cudaLaunchAttribute cluster{};                                              \
    cluster.id = cudaLaunchAttributeClusterDimension;                           \
    cluster.val.clusterDim = {2, 1, 1};                                         \
    cudaLaunchConfig_t config{};                                                \
    config.gridDim = dim3(grid), config.blockDim = dim3(block);                 \
    config.dynamicSmemBytes = shared, config.stream = stream;                   \
    config.attrs = &cluster, config.numAttrs = 1;                               \
    check(cudaLaunchKernelEx(&config, kernel, __VA_ARGS__), "cudaLaunchKernelEx"); \
  } while (false)

__device__ __forceinline__ int pair_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
// Both halves of a barrier of all threads of the pair.
__device__ __forceinline__ void pair_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void pair_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t peers(const void* mine) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(pair_rank() ^ 1));
  return address;
}
__device__ __forceinline__ void barrier_arrive_peer(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peers(barrier)) : "memory");
}
// From this CTA's shared memory to the other's, whose barrier of that name counts the bytes.
__device__ __forceinline__ void bulk_copy_peer(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(peers(to)),
               "r"(shared_address(from)), "r"(bytes), "r"(peers(barrier))
               : "memory");
}

// --- bulk copies: contiguous, 16-byte aligned, run by the copy engine ------------------------------------------------------

// Whether this is the lane that acts for its warp, which is together. Where copies are behind this condition and no other, the assembler needs no loop over
// lanes for each, and keeps in uniform registers what they are told.
__device__ __forceinline__ bool elected() {
  uint32_t is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}\n" : "=r"(is)::"memory");
  return is != 0;
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// A box of 64 columns of a head, from `column` on, by the map's number of tokens, from `token` on, of a tensor [tokens, heads, 128] of 16 bits: 128
// bytes a token as they come from the swizzle of 128 bytes, at a multiple of 1024. What lies outside of the tensor becomes zeros. The map is
// in a __grid_constant__ parameter.
__device__ __forceinline__ void tensor_copy(void* to, const TensorMap& map, int column, int head, int token, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(column), "r"(head), "r"(token), "r"(shared_address(barrier))
      : "memory");
}
// The other way; `from` may be written again when bulk_store_wait has returned.
__device__ __forceinline__ void tensor_store(const TensorMap& map, int column, int head, int token, const void* from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\ncp.async.bulk.commit_group;" ::"l"(&map), "r"(column), "r"(head),
               "r"(token), "r"(shared_address(from))
               : "memory");
}
// The box of tensor_copy into L2.
__device__ __forceinline__ void tensor_prefetch(const TensorMap& map, int column, int head, int token) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(column), "r"(head), "r"(token)
               : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// The other way, from shared to global memory; `from` may be written again when bulk_store_wait has returned.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// copy_async of what is read once: it leaves L2 before anything else does.
__device__ __forceinline__ void copy_once(void* to, const void* from, bool valid) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;\n}\n" ::"r"(shared_address(to)),
      "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}
// An index of 4 or 8 bytes.
__device__ __forceinline__ void copy_index(void* to, const void* from, bool wide) {
  if (wide)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Into L2, to be read from there soon.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Ordinary writes to shared memory, before the copy engine or a wgmma reads them.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- some of a CTA's threads, all of these and no others --------------------------------------------------------------------

template <int kThreads, int kBarrier = 1>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// --- warpgroups ----------------------------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Dynamic shared memory, its start rounded up to `alignment`; the launch asks for that much more.
__device__ __forceinline__ uint8_t* align_shared(uint8_t* shared, uint32_t alignment) {
  return shared + (-shared_address(shared) & (alignment - 1));
}

// 16 bytes to global memory, where the compiler cannot see that a pointer leads there.
__device__ __forceinline__ void store_global(void* to, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// --- loads from shared memory that stay where they are written, before or behind products -----------------------------------

__device__ __forceinline__ float load_shared(const float* from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared_address(from)) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared(const float2* from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared_address(from)) : "memory");
  return x;
}

// --- 8x8 tiles, from registers to shared memory, turned: rows of the tiles in memory are columns of the registers' -------

__device__ __forceinline__ void store_tiles_transposed(void* row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// --- products of a warpgroup: d += a b, a [64, 16] in registers or shared memory, b [16, N] in shared memory ---------------
// Warp w of the four holds rows 16 w to 16 w + 15 of a and d, in the fragments of primitives.cuh: d[n] is the tile of
// columns 8 n to 8 n + 7. Asynchronous: multiply_fence() after registers were written otherwise and before the first
// product, multiply_commit() behind the last, multiply_wait<N>() until at most N commits are under way, then pin() on what
// may be read, so that the compiler does not read it earlier.

__device__ __forceinline__ void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void pin(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[n][i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// Where b is. `leading` and `stride` are byte distances; what they lie between depends on the layout:
//   plain layout, b^T with rows of 16 (K-major): 8x8 tiles of 128 contiguous bytes, row by row; leading from a tile to the
//     next 8 of k, stride to the next 8 columns of b
//   swizzled, K-major: rows of 128 bytes, a column of b each, 8 of them a group of 1024 bytes; stride from group to group
//   swizzled, N-major: rows of 128 bytes, 64 columns of one k, 8 k a group of 1024 bytes; stride from group to group of k,
//     leading to the next 64 columns
// Swizzled: 16-byte piece c of row r of a group lies at piece c ^ r; groups start at multiples of 1024 bytes.
enum class Layout : uint32_t { plain = 0, swizzled = 1 };

struct Description {
  uint32_t low, high;

  // The same, so many bytes further on: one addition.
  __device__ __forceinline__ Description operator+(int bytes) const { return {low + (bytes >> 4), high}; }
  __device__ __forceinline__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
};
__device__ __forceinline__ Description describe(const void* b, Layout layout, uint32_t leading, uint32_t stride) {
  return {(shared_address(b) & 0x3ffff) >> 4 | (leading >> 4) << 16, (stride >> 4) | uint32_t(layout) << 30};
}

template <class T, int kTiles = 8>  // b as columns of 16 k, for the first so many tiles of d: N = 64, 48, 32, 16
__device__ __forceinline__ void multiply_k_major(float (&d)[8][4], const uint32_t* a, const Description& b, int add);
template <class T>  // the same with a in shared memory too, as 64 rows of 16 k
__device__ __forceinline__ void multiply_tiles(float (&d)[8][4], const Description& a, const Description& b, int add);
template <class T>  // N = 128, b as rows of columns
__device__ __forceinline__ void multiply_n_major(float (&d)[16][4], const uint32_t* a, const Description& b, int add);

#define GDN_TILE(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define GDN_TILES(d, n) GDN_TILE(d[n]), GDN_TILE(d[n + 1]), GDN_TILE(d[n + 2]), GDN_TILE(d[n + 3])
#define GDN_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GDN_16 GDN_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GDN_24 GDN_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GDN_32 GDN_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
// `d_list`, `a_list`, `b_at` and `add_at` number what is in d, a, b and add; the rest is d.
#define GDN_K_MAJOR(T, type, tiles, n, d_list, a_list, b_at, add_at, ...) \
  template <> \
  __device__ __forceinline__ void multiply_k_major<T, tiles>(float (&d)[8][4], const uint32_t* a, const Description& b, int add) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " add_at ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" d_list "}, {" a_list "}, " b_at ", p, 1, 1, 0;\n}\n" \
        : __VA_ARGS__ \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(add)); \
  }
#define GDN_PRODUCTS(T, type) \
  GDN_K_MAJOR(T, type, 8, "64", GDN_32, "%32, %33, %34, %35", "%36", "%37", GDN_TILES(d, 0), GDN_TILES(d, 4)) \
  GDN_K_MAJOR(T, type, 6, "48", GDN_24, "%24, %25, %26, %27", "%28", "%29", GDN_TILES(d, 0), GDN_TILE(d[4]), GDN_TILE(d[5])) \
  GDN_K_MAJOR(T, type, 4, "32", GDN_16, "%16, %17, %18, %19", "%20", "%21", GDN_TILES(d, 0)) \
  GDN_K_MAJOR(T, type, 2, "16", GDN_8, "%8, %9, %10, %11", "%12", "%13", GDN_TILE(d[0]), GDN_TILE(d[1])) \
  template <> \
  __device__ __forceinline__ void multiply_tiles<T>(float (&d)[8][4], const Description& a, const Description& b, int add) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
        "%32, %33, p, 1, 1, 0, 0;\n}\n" \
        : GDN_TILES(d, 0), GDN_TILES(d, 4) \
        : "l"(a.bits()), "l"(b.bits()), "r"(add)); \
  } \
  template <> \
  __device__ __forceinline__ void multiply_n_major<T>(float (&d)[16][4], const uint32_t* a, const Description& b, int add) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n" \
        : GDN_TILES(d, 0), GDN_TILES(d, 4), GDN_TILES(d, 8), GDN_TILES(d, 12) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(add)); \
  }
GDN_PRODUCTS(__nv_bfloat16, "bf16")
GDN_PRODUCTS(__half, "f16")
#undef GDN_PRODUCTS
#undef GDN_K_MAJOR
#undef GDN_32
#undef GDN_24
#undef GDN_16
#undef GDN_8
#undef GDN_TILES
#undef GDN_TILE

}  // namespace gdn
#endif
