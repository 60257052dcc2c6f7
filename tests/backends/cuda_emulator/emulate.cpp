// The scheduler of emulate.h, and the few runtime calls that host code makes.
#include "emulate.h"

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <vector>

namespace emu {

Fiber* self = nullptr;
std::vector<Late> late;
bool hard = false;
uint3 block_index;
dim3 block_size, grid_size;
unsigned char* shared = nullptr;

namespace {

constexpr size_t kStack = 256 << 10;

struct Running {
  Fiber fiber;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  std::deque<Fiber::Copy> copies;
  bool done = true;
};

ucontext_t scheduler;
std::vector<std::unique_ptr<Running>> threads;
Running* current = nullptr;
const std::function<void()>* body = nullptr;
Barrier barriers[kRanks], cluster;
std::minstd_rand randomness(1);

void enter() {
  (*body)();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

void apply(std::deque<Fiber::Copy>& copies, int before_group) {
  while (!copies.empty() && copies.front().group < before_group) {
    std::memcpy(copies.front().to, copies.front().data, copies.front().bytes);
    copies.pop_front();
  }
}

bool can_run(const Running& t) { return !t.done && !(t.fiber.waits_on && *t.fiber.waits_on == t.fiber.waits_while); }

// Until it waits again. Whether it is done.
bool resume(Running& t) {
  t.fiber.waits_on = nullptr;
  current = &t;
  self = &t.fiber;
  shared = self->shared, block_index = self->block;
  swapcontext(&scheduler, &t.context);
  return t.done;
}

[[noreturn]] void stuck() {
  std::fprintf(stderr, "emulator: the threads of a block wait for each other for ever\n");
  std::abort();
}

// All threads in turn, in another order each time.
void run_in_turn(int count) {
  std::vector<int> order(count);
  for (int i = 0; i < count; i++) order[i] = i;
  for (int left = count; left > 0;) {
    std::shuffle(order.begin(), order.end(), randomness);
    bool moved = false;
    for (int i : order)
      if (can_run(*threads[i])) moved = true, left -= resume(*threads[i]);
    if (!moved) stuck();
  }
}

// The warp of the highest priority that can run, again and again. Priorities change after a while, for some warps to the lowest; in some warps
// one lane lags; what is late happens at any time, seldom, or when nothing else can.
void run_unfairly(int count, int seed) {
  std::minstd_rand random(unsigned(seed) * 7919 + 13);
  const auto below = [&](int n) { return int(random() / 7 % n); };
  const int warps = count / 32, lateness = below(3), period = 1 << (3 + below(14));
  std::vector<int> priority(warps), lagging(warps);
  const auto happen = [&](int i) {
    const auto run = std::move(late[i].run);
    late.erase(late.begin() + i);
    run();
  };
  int until = 0, step = 0;
  for (int left = count; left > 0; step++) {
    if (step >= until) {
      for (int w = 0; w < warps; w++) {
        priority[w] = below(1000) - (below(4) == 0 ? 1000 : 0);
        lagging[w] = below(4) == 0 ? below(32) : -1;
      }
      until = step + period / 2 + below(period);
    }
    if (!late.empty() && (lateness == 0 || (lateness == 1 && below(50) == 0))) happen(below(int(late.size())));
    int best = -1;
    for (int w = 0; w < warps; w++)
      for (int lane = 0; lane < 32; lane++)
        if (can_run(*threads[32 * w + lane])) {
          if (best < 0 || priority[w] > priority[best]) best = w;
          break;
        }
    if (best < 0) {
      if (late.empty()) stuck();
      happen(below(int(late.size())));
      continue;
    }
    const int first = below(32);
    bool moved = false;
    for (int lagged = 0; lagged < 2 && !moved; lagged++)
      for (int i = 0; i < 32; i++) {
        const int lane = (first + i) % 32;
        Running& t = *threads[32 * best + lane];
        if (can_run(t) && (lagged || lane != lagging[best])) moved = true, left -= resume(t);
      }
  }
  for (const Late& x : late) {
    if (!x.store) {
      std::fprintf(stderr, "emulator: a copy to shared memory comes after the end of its CTAs\n");
      std::abort();
    }
    x.run();
  }
  late.clear();
}

// CTAs that run at the same time, each with its own shared memory.
void run_blocks(int size, const std::vector<uint3>& blocks, const std::vector<unsigned char*>& memory) {
  const int count = size * int(blocks.size());
  std::vector<Warp> warps(blocks.size() * ((size + 31) / 32));
  for (Barrier& barrier : barriers) barrier = {};
  cluster = {};
  for (int i = 0; i < count; i++) {
    Running& t = *threads[i];
    t.fiber = {};
    t.fiber.rank = i / size;
    t.fiber.block = blocks[i / size];
    t.fiber.shared = memory[i / size];
    t.fiber.peer = memory[blocks.size() - 1 - i / size];
    t.fiber.thread = {unsigned(i % size), 0, 0};
    t.fiber.lane = i % size % 32;
    t.fiber.warp = &warps[i / size * ((size + 31) / 32) + i % size / 32];
    t.copies.clear();
    t.fiber.copies = &t.copies;
    t.done = false;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = kStack;
    t.context.uc_link = &scheduler;
    makecontext(&t.context, enter, 0);
  }
  const char* order = std::getenv("EMULATED_ORDER");
  hard = order != nullptr && size % 32 == 0;
  hard ? run_unfairly(count, std::atoi(order)) : run_in_turn(count);
}

}  // namespace

void wait(Barrier& b, int count) {
  const uint64_t generation = b.generation;
  if (++b.arrived == count) {
    b.arrived = 0;
    b.generation++;
    return;
  }
  self->waits_on = &b.generation;
  self->waits_while = generation;
  swapcontext(&current->context, &scheduler);
}

void block_barrier() { wait(barriers[self->rank], int(block_size.x)); }
void cluster_arrive() {
  self->cluster_phase = cluster.generation;
  if (++cluster.arrived == kRanks * int(block_size.x)) cluster.arrived = 0, cluster.generation++;
}
void cluster_wait() {
  if (cluster.generation != self->cluster_phase) return;
  self->waits_on = &cluster.generation;
  self->waits_while = cluster.generation;
  swapcontext(&current->context, &scheduler);
}

void later(bool store, std::function<void()> what) {
  if (hard)
    late.push_back({self, store, std::move(what)});
  else
    what();
}

void copy(void* to, const void* from, bool valid, int bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | (valid ? reinterpret_cast<uintptr_t>(from) : 0)) % bytes) std::abort();
  Fiber::Copy copy{to, {}, self->open_group, bytes};
  if (valid) std::memcpy(copy.data, from, bytes);
  // What was there must not be read until the copy has arrived.
  std::memset(to, 0xff, bytes);
  static_cast<std::deque<Fiber::Copy>*>(self->copies)->push_back(copy);
}
void copy_commit() { self->open_group++; }
void copy_wait(int pending) { apply(*static_cast<std::deque<Fiber::Copy>*>(self->copies), self->open_group - pending); }

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread, int together) {
  while (threads.size() < block.x * together) threads.push_back(std::make_unique<Running>());
  // The same address in all CTAs, up to multiples of 1024.
  constexpr size_t kAlignment = 1024, kOff = 128, kBehind = 64;
  std::vector<std::vector<unsigned char>> memory(together, std::vector<unsigned char>(kAlignment + kOff + shared_bytes + kBehind));
  std::vector<unsigned char*> starts;
  for (auto& x : memory) starts.push_back(x.data() + kOff + (-reinterpret_cast<uintptr_t>(x.data()) & (kAlignment - 1)));
  // Before a CTA starts: bytes of 0xff, of which numbers are NaN, and here and there one of 0, so that what is read without having been written is not
  // the same for all lanes.
  std::vector<unsigned char> nothing(shared_bytes);
  std::minstd_rand random(1);
  for (auto& x : nothing) x = random() % 8 ? 0xff : 0;
  body = &thread;
  block_size = block;
  grid_size = grid;
  if (grid.x % together) std::abort();
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x += together) {
        std::vector<uint3> blocks;
        for (int i = 0; i < together; i++) {
          blocks.push_back({x + i, y, z});
          std::copy(nothing.begin(), nothing.end(), starts[i]);
          std::memset(starts[i] + shared_bytes, 0xa5, kBehind);
        }
        run_blocks(int(block.x), blocks, starts);
        for (unsigned char* start : starts)
          for (size_t i = 0; i < kBehind; i++)
            if (start[shared_bytes + i] != 0xa5) {
              std::fprintf(stderr, "emulator: a kernel wrote past its shared memory\n");
              std::abort();
            }
      }
}

}  // namespace emu

extern "C" {
const char* cudaGetErrorString(cudaError_t) { return "no error: this is an emulator"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
// A number beyond those that device.h remembers, so that a test may change what follows.
cudaError_t cudaGetDevice(int* device) { return *device = 64, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  // As many multiprocessors as the test asks for, so that each way of splitting work gets its turn.
  const char* wanted = std::getenv(attribute == cudaDevAttrMultiProcessorCount ? "EMULATED_MULTIPROCESSORS" : "EMULATED_SHARED");
  *value = wanted ? std::atoi(wanted) : attribute == cudaDevAttrMultiProcessorCount ? 4 : 227 << 10;
  return cudaSuccess;
}
}
