// Runs CUDA kernels on a CPU, one fiber a thread, for tests without a GPU: each CTA in turn, its threads in an order
// that changes at random whenever they wait, so that a missing barrier shows. Shared memory starts as NaN bytes.
// With EMULATED_ORDER=n in the environment the n-th of many orders that are hard on a kernel: some warps run as long as they can
// while others stand, lanes lag behind their warp, and what is asynchronous happens late (Late).
// Only what csrc/ uses is here; csrc/common/primitives.cuh says what each instruction does.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

namespace emu {

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  alignas(16) unsigned char exchange[2][32][64];
};

struct Fiber {
  uint3 thread;
  int lane;
  Warp* warp;
  int rank;  // in its cluster
  uint3 block;
  unsigned char *shared, *peer;  // shared memory, and that of the other CTA of a pair
  uint64_t cluster_phase;
  const uint64_t* waits_on = nullptr;
  uint64_t waits_while = 0;
  struct Copy {
    void* to;
    unsigned char data[16];
    int group, bytes = 16;
  };
  void* copies = nullptr;  // std::deque<Copy>
  int open_group = 0;
  std::deque<std::pair<int, std::function<void()>>> products;  // of a warpgroup, by the group they were committed in
  int open_products = 0;
};

// What the copy engine has been asked for and has not done yet; a store is from shared memory to global.
struct Late {
  Fiber* by;
  bool store;
  std::function<void()> run;
};
extern std::vector<Late> late;
extern bool hard;  // EMULATED_ORDER is set
void later(bool store, std::function<void()> what);  // now, unless `hard`

extern Fiber* self;
extern uint3 block_index;
extern dim3 block_size, grid_size;
extern unsigned char* shared;

void wait(Barrier& barrier, int count);
constexpr int kRanks = 2;  // CTAs of a cluster at most
void block_barrier();
void cluster_arrive();
void cluster_wait();
void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread, int together = 1);
void copy(void* to, const void* from, bool valid, int bytes = 16);
void copy_commit();
void copy_wait(int pending);

// All lanes' values, in lane order.
template <class T>
inline void gather(const T& mine, T (&all)[32]) {
  static_assert(sizeof(T) <= 64, "too large to exchange");
  Warp& warp = *self->warp;
  auto& slots = warp.exchange[warp.barrier.generation % 2];
  std::memcpy(slots[self->lane], &mine, sizeof(T));
  wait(warp.barrier, 32);
  for (int i = 0; i < 32; i++) std::memcpy(&all[i], slots[i], sizeof(T));
}

}  // namespace emu

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__
#define __shared__ static_assert(false, "use GDN_SHARED");
#define GDN_LAUNCH(kernel, grid, block, shared, stream, ...) emu::run(grid, block, shared, [=] { kernel(__VA_ARGS__); })
#define GDN_SHARED(name) uint8_t* const name = emu::shared
#define threadIdx (emu::self->thread)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)

inline void __syncthreads() { emu::block_barrier(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emu::wait(emu::self->warp->barrier, 32); }
template <class T>
inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  T all[32];
  emu::gather(x, all);
  return all[(emu::self->lane & ~(width - 1)) | (lane & (width - 1))];
}
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask, int = 32) {
  T all[32];
  emu::gather(x, all);
  return all[emu::self->lane ^ mask];
}
template <class T>
inline T __shfl_up_sync(unsigned, T x, int delta, int width = 32) {
  T all[32];
  emu::gather(x, all);
  const int lane = emu::self->lane;
  return (lane & (width - 1)) >= delta ? all[lane - delta] : x;
}
inline unsigned __ballot_sync(unsigned, bool x) {
  bool all[32];
  emu::gather(x, all);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= unsigned(all[i]) << i;
  return bits;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
// CTAs run one after another, and fibers change only where they wait.
inline unsigned atomicAdd(unsigned* address, unsigned x) { return *address += x, *address - x; }
inline unsigned atomicMax(unsigned* address, unsigned x) {
  const unsigned was = *address;
  if (x > was) *address = x;
  return was;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}

namespace gdn {

inline uint4 load_stream(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16) std::abort();
  return *static_cast<const uint4*>(address);
}
inline void store_stream(void* address, const uint4& x) {
  if (reinterpret_cast<uintptr_t>(address) % 16) std::abort();
  *static_cast<uint4*>(address) = x;
}
inline void prefetch_line(const void* from) {
  volatile char seen = *static_cast<const char*>(from);  // a test's sanitizer sees where it goes
  (void)seen;
}
inline void copy_async(void* to, const void* from, bool valid) { emu::copy(to, from, valid); }
inline void copy_word(void* to, const void* from) { emu::copy(to, from, true, 4); }
inline void copy_commit() { emu::copy_commit(); }
template <int N>
inline void copy_wait() {
  emu::copy_wait(N);
}

inline void load_tiles(uint32_t (&x)[4], const void* row) {
  const void* rows[32];
  emu::gather(row, rows);
  const int g = emu::self->lane / 4, p = emu::self->lane % 4;
  for (int i = 0; i < 4; i++) {
    if (reinterpret_cast<uintptr_t>(rows[8 * i + g]) % 16) std::abort();
    std::memcpy(&x[i], static_cast<const char*>(rows[8 * i + g]) + 4 * p, 4);
  }
}
inline void load_tiles_transposed(uint32_t (&x)[4], const void* row) {
  const void* rows[32];
  emu::gather(row, rows);
  const int g = emu::self->lane / 4, p = emu::self->lane % 4;
  for (int i = 0; i < 4; i++) {
    uint16_t pair[2];
    for (int j = 0; j < 2; j++) std::memcpy(&pair[j], static_cast<const char*>(rows[8 * i + 2 * p + j]) + 2 * g, 2);
    std::memcpy(&x[i], pair, 4);
  }
}
inline uint32_t transpose_tile(uint32_t x) {
  uint32_t all[32];
  emu::gather(x, all);
  const int g = emu::self->lane / 4, p = emu::self->lane % 4;
  const auto element = [&](int row, int column) { return all[row * 4 + column / 2] >> (column % 2 * 16) & 0xffff; };
  return element(2 * p, g) | element(2 * p + 1, g) << 16;
}

struct Operands {
  uint32_t a[4], b[2];
};

template <class T>
inline float element(uint32_t pair, int which) {
  const uint16_t bits = uint16_t(pair >> (16 * which));
  T x;
  std::memcpy(&x, &bits, 2);
  return float(x);
}

template <class T>
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all[32];
  emu::gather(mine, all);
  const int g = emu::self->lane / 4, p = emu::self->lane % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * p + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      const uint32_t left = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const uint32_t right = all[column * 4 + k % 8 / 2].b[k / 8];
      sum += double(element<T>(left, k % 2)) * element<T>(right, k % 2);
    }
    d[i] = float(sum);
  }
}

inline uint32_t to_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + 0x1000u) & ~0x1fffu : bits;
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all[32];
  emu::gather(mine, all);
  const int g = emu::self->lane / 4, p = emu::self->lane % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * p + i % 2;
    double sum = d[i];
    for (int k = 0; k < 8; k++) {
      const uint32_t left = all[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2], right = all[column * 4 + k % 4].b[k / 4];
      sum += double(__uint_as_float(left)) * __uint_as_float(right);
    }
    d[i] = float(sum);
  }
}

}  // namespace gdn
