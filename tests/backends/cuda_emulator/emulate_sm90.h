// The machine from sm_90a on, on a CPU: csrc/common/sm90_primitives.cuh says what each function does. Shared memory layouts
// are decoded as the descriptors say, barriers count arrivals and bytes, and copies poison their target first.
#pragma once
#include <algorithm>
#include <array>
#include <cfloat>
#include <climits>
#include <cstdio>
#include <map>

#include "common/tensor_map.h"
#include "emulate.h"

namespace emu {

// What an mbarrier is; found by its address in shared memory.
struct MemoryBarrier {
  int arrivals = 0, pending = 0, parity = 0;
  long bytes = 0;
  Barrier waiters;
};

inline MemoryBarrier& memory_barrier(uint64_t* address) {
  static std::map<uint64_t*, MemoryBarrier> all;
  return all[address];
}

inline void end_phase_if_complete(MemoryBarrier& b) {
  if (b.pending > 0 || b.bytes > 0) return;
  b.pending = b.arrivals;
  b.parity ^= 1;
  b.waiters.arrived = 0;
  b.waiters.generation++;
}

}  // namespace emu

#define GDN_LAUNCH_BEHIND GDN_LAUNCH
#define GDN_LAUNCH_PAIRS(kernel, grid, block, shared, stream, ...) emu::run(grid, block, shared, [=] { kernel(__VA_ARGS__); }, 2)

namespace gdn {

inline void let_next_start() {}
inline void wait_for_previous() {}

inline long long clock64() {
  static long long now = 0;
  return now += 1 << 20;
}

inline float exp2_approximate(float x) {
  const float y = exp2f(x);
  return y < FLT_MIN ? 0.f : y;
}

inline uint32_t larger_halves(uint32_t x, uint32_t y) {
  const auto number = [](uint32_t h) { return (h & 0x7fff) > 0x7c00 ? 0u : h & 0x7fff; };
  return std::max(number(x & 0xffff), number(y & 0xffff)) | std::max(number(x >> 16), number(y >> 16)) << 16;
}

inline uint32_t round_to_tf32(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return (y + 0x1000u) & ~0x1fffu;
}

inline void barrier_init(uint64_t* barrier, int arrivals) {
  auto& b = emu::memory_barrier(barrier);
  b = {};
  b.arrivals = b.pending = arrivals;
}
inline void barrier_init_done() {}
inline void barrier_arrive(uint64_t* barrier) {
  auto& b = emu::memory_barrier(barrier);
  if (--b.pending < 0) std::abort();
  emu::end_phase_if_complete(b);
}
constexpr int kWarpArrivals = 1;
inline void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (emu::self->lane == 0) barrier_arrive(barrier);
}
inline void barrier_arrive_expect(uint64_t* barrier, int bytes) {
  emu::memory_barrier(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_arrive_copies(uint64_t* barrier) {
  emu::copy_commit();
  emu::copy_wait(0);
  barrier_arrive(barrier);
}
template <bool = false>
inline void barrier_wait(uint64_t* barrier, int parity) {
  auto& b = emu::memory_barrier(barrier);
  if (b.parity == parity) emu::wait(b.waiters, INT_MAX);
  if (b.parity == parity) {
    std::fprintf(stderr, "emulator: thread %u saw a barrier's phase only when the next had ended as well\n", threadIdx.x);
    std::abort();
  }
}
inline uint32_t barrier_ended(uint64_t* barrier, int parity) { return emu::memory_barrier(barrier).parity != parity; }

// The other CTA's, of the same name.
template <class T>
inline T* peers(T* mine) {
  return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(mine) - emu::self->shared + emu::self->peer);
}
inline int pair_rank() { return emu::self->rank; }
inline void pair_arrive() { emu::cluster_arrive(); }
inline void pair_wait() { emu::cluster_wait(); }
inline void barrier_arrive_peer(uint64_t* barrier) { barrier_arrive(peers(barrier)); }
// The copy engine's: at once, or late.
inline void landed(uint64_t* barrier, int bytes) {
  auto& b = emu::memory_barrier(barrier);
  b.bytes -= bytes;
  emu::end_phase_if_complete(b);
}
inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(bytes)) % 16) std::abort();
  if (emu::hard) std::memset(to, 0xff, bytes);
  emu::later(false, [=] {
    std::memcpy(to, from, bytes);
    landed(barrier, bytes);
  });
}
inline void bulk_copy_peer(void* to, const void* from, int bytes, uint64_t* barrier) {
  bulk_copy(peers(static_cast<unsigned char*>(to)), from, bytes, peers(barrier));
}

// The stand-in for what the driver encodes. False where the driver would refuse.
inline bool make_tensor_map(TensorMap& map, const void* data, int64_t heads, int64_t tokens, int64_t head_stride, int64_t token_stride, int box_tokens) {
  const auto bad_stride = [](int64_t bytes) { return bytes % 16 != 0 || bytes <= 0 || bytes >= int64_t(1) << 40; };
  if (reinterpret_cast<uintptr_t>(data) % 16 || bad_stride(head_stride) || bad_stride(token_stride) || heads < 1 || tokens < 1) return false;
  map = {{reinterpret_cast<uint64_t>(data), uint64_t(heads), uint64_t(tokens), uint64_t(head_stride), uint64_t(token_stride), 0x6d6170, uint64_t(box_tokens)}};
  return true;
}
// Each element of a box that lies inside of the tensor, where it is in shared memory and there; null outside.
template <class F>
inline void each_of_box(const TensorMap& map, int column, int head, int token, F&& f) {
  const auto& x = map.words;
  for (int t = 0; t < int(x[6]); t++)
    for (int c = 0; c < 64; c++) {
      const bool inside = token + t >= 0 && token + t < int64_t(x[2]) && head >= 0 && head < int64_t(x[1]) && column + c >= 0 && column + c < 128;
      const uint32_t at = t * 128 + c * 2;
      f(at ^ (at >> 7 & 7) << 4, inside ? reinterpret_cast<char*>(x[0]) + head * x[3] + (token + t) * x[4] + (column + c) * 2 : nullptr);
    }
}
inline void check_box(const void* shared, const TensorMap& map) {
  if (reinterpret_cast<uintptr_t>(shared) % 1024 || reinterpret_cast<uintptr_t>(&map) % 64 || map.words[5] != 0x6d6170) std::abort();
}
inline void tensor_copy(void* to, const TensorMap& map, int column, int head, int token, uint64_t* barrier) {
  check_box(to, map);
  const int bytes = int(map.words[6]) * 128;
  if (emu::hard) std::memset(to, 0xff, bytes);
  emu::later(false, [=, &map] {
    each_of_box(map, column, head, token, [&](uint32_t at, const char* from) {
      const uint16_t zero = 0;
      std::memcpy(static_cast<char*>(to) + at, from ? from : reinterpret_cast<const char*>(&zero), 2);
    });
    landed(barrier, bytes);
  });
}
inline bool elected() { return threadIdx.x % 32 == 0; }
inline void tensor_store(const TensorMap& map, int column, int head, int token, const void* from) {
  check_box(from, map);
  emu::later(true, [=, &map] {
    each_of_box(map, column, head, token, [&](uint32_t at, char* to) {
      if (to) std::memcpy(to, static_cast<const char*>(from) + at, 2);
    });
  });
}
inline void tensor_prefetch(const TensorMap& map, int column, int, int) {
  if (reinterpret_cast<uintptr_t>(&map) % 64 || map.words[5] != 0x6d6170 || column % 64) std::abort();
}
inline void prefetch_map(const TensorMap&) {}
inline void bulk_store(void* to, const void* from, int bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(bytes)) % 16) std::abort();
  emu::later(true, [=] { std::memcpy(to, from, bytes); });
}
inline void bulk_store_wait() {
  for (size_t i = 0; i < emu::late.size();)
    if (emu::late[i].store && emu::late[i].by == emu::self) {
      const auto run = std::move(emu::late[i].run);
      emu::late.erase(emu::late.begin() + i);
      run();
    } else {
      i++;
    }
}
inline void copy_once(void* to, const void* from, bool valid) { copy_async(to, from, valid); }
inline void copy_index(void* to, const void* from, bool wide) { std::memcpy(to, from, wide ? 8 : 4); }
inline void bulk_prefetch(const void* from, int bytes) {
  if ((reinterpret_cast<uintptr_t>(from) | uintptr_t(bytes)) % 16) std::abort();
}
inline void fence_async_proxy() {}
inline void store_global(void* to, const uint4& x) { std::memcpy(to, &x, 16); }
template <class T>
inline T load_shared(const T* from) {
  return *from;
}
template <int kThreads, int kBarrier = 1>
inline void meet() {
  static emu::Barrier barriers[emu::kRanks];
  emu::wait(barriers[emu::self->rank], kThreads);
}
template <int N>
inline void registers_up() {}
template <int N>
inline void registers_down() {}
inline uint8_t* align_shared(uint8_t* shared, uint32_t alignment) {
  return shared + (-reinterpret_cast<uintptr_t>(shared) & (alignment - 1));
}

inline void store_tiles_transposed(void* row, const uint32_t (&x)[4]) {
  struct Mine {
    void* row;
    uint32_t x[4];
  } mine{row, {x[0], x[1], x[2], x[3]}}, all[32];
  emu::gather(mine, all);
  // Lane r of eight writes row r of tile i: elements (0, r) to (7, r) of the registers' tile.
  const int i = emu::self->lane / 8, r = emu::self->lane % 8;
  uint16_t out[8];
  for (int j = 0; j < 8; j++) out[j] = uint16_t(all[4 * j + r / 2].x[i] >> (r % 2 * 16));
  if (reinterpret_cast<uintptr_t>(row) % 16) std::abort();
  std::memcpy(row, out, 16);
}

// Products of a warpgroup happen where they are asked for or, in a hard order, where they are waited for.
inline void multiply_fence() {}
inline void multiply_commit() { emu::self->open_products++; }
template <int N>
inline void multiply_wait() {
  auto& products = emu::self->products;
  while (!products.empty() && products.front().first < emu::self->open_products - N) {
    const auto run = std::move(products.front().second);
    products.pop_front();
    run();
  }
}
template <class F>
inline void product(F&& run) {
  if (emu::hard)
    emu::self->products.emplace_back(emu::self->open_products, run);
  else
    run();
}
template <class X>
inline void pin(X&) {}

enum class Layout : uint32_t { plain = 0, swizzled = 1 };

struct Description {
  const uint8_t* start;
  Layout layout;
  uint32_t leading, stride;

  Description operator+(int bytes) const {
    if (bytes % 16) std::abort();
    return {start + bytes, layout, leading, stride};
  }
};

inline Description describe(const void* b, Layout layout, uint32_t leading, uint32_t stride) {
  if (reinterpret_cast<uintptr_t>(b) % 16) std::abort();
  return {static_cast<const uint8_t*>(b), layout, leading, stride};
}

// Address bits 4 to 6 are exchanged with those of 7 to 9, as the hardware does.
inline const uint8_t* swizzle(const uint8_t* address, Layout layout) {
  const auto x = reinterpret_cast<uintptr_t>(address);
  return layout == Layout::plain ? address : reinterpret_cast<const uint8_t*>(x ^ (x >> 7 & 7) << 4);
}

// A warp's 16 rows of a product, with element (k, n) of b found by `at`.
template <class T, int kTiles = 0, int N, class At>
inline void multiply(float (&d)[N][4], const uint32_t* a, int add, At&& at) {
  struct Mine {
    uint32_t a[4];
  } mine{{a[0], a[1], a[2], a[3]}}, all[32];
  emu::gather(mine, all);
  const int g = emu::self->lane / 4, p = emu::self->lane % 4;
  float left[2][16];
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < 16; k++) left[i][k] = element<T>(all[g * 4 + k % 8 / 2].a[i + k / 8 * 2], k % 2);
  for (int n = 0; n < (kTiles > 0 ? kTiles : N); n++)
    for (int e = 0; e < 2; e++)
      for (int i = 0; i < 2; i++) {
        double sum = add ? d[n][2 * i + e] : 0.;
        for (int k = 0; k < 16; k++) {
          T right;
          std::memcpy(&right, at(k, 8 * n + 2 * p + e), 2);
          sum += double(left[i][k]) * float(right);
        }
        d[n][2 * i + e] = float(sum);
      }
}

using Words = std::array<uint32_t, 4>;

template <class T, int kTiles = 8>
inline void multiply_k_major(float (&d)[8][4], const Words& a, const Description& b, int add) {
  multiply<T, kTiles>(d, a.data(), add, [&](int k, int n) {
    if (b.layout == Layout::plain) return b.start + k / 8 * b.leading + n / 8 * b.stride + n % 8 * 16 + k % 8 * 2;
    return swizzle(b.start + n / 8 * b.stride + n % 8 * 128 + k * 2, b.layout);
  });
}
template <class T, int kTiles = 8>
inline void multiply_k_major(float (&d)[8][4], const uint32_t* a, const Description& b, int add) {
  product([&d, a = Words{a[0], a[1], a[2], a[3]}, b, add] { multiply_k_major<T, kTiles>(d, a, b, add); });
}
template <class T>
inline void multiply_tiles(float (&d)[8][4], const Description& a, const Description& b, int add) {
  if (a.layout != Layout::swizzled) std::abort();
  product([&d, a, b, add] {
    const int lane = emu::self->lane, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    Words left;
    for (int i = 0; i < 4; i++) {
      const int m = row + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
      std::memcpy(&left[i], swizzle(a.start + m / 8 * a.stride + m % 8 * 128 + k * 2, a.layout), 4);
    }
    multiply_k_major<T>(d, left, b, add);
  });
}
template <class T>
inline void multiply_n_major(float (&d)[16][4], const uint32_t* a, const Description& b, int add) {
  if (b.layout == Layout::plain) std::abort();
  product([&d, a = Words{a[0], a[1], a[2], a[3]}, b, add] {
    multiply<T>(d, a.data(), add, [&](int k, int n) {
      return swizzle(b.start + n / 64 * b.leading + k / 8 * b.stride + k % 8 * 128 + n % 64 * 2, b.layout);
    });
  });
}

}  // namespace gdn
