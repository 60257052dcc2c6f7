// State rows on their way, on a CPU: csrc/decode/sm90_stream.cuh says what each function does. A bulk store reads its source
// as late as it may: when its group is waited for. A bulk load is seen by nobody before its barrier says so.
#pragma once
#include <deque>
#include <map>

#include "emulate_sm90.h"

namespace emu {

struct BulkStore {
  void* to;
  const void* from;  // null: the end of a group
  int bytes;
};

inline std::deque<BulkStore>& bulk_stores() {
  static std::map<Fiber*, std::deque<BulkStore>> all;  // empty again when a thread that waits for its last group ends
  return all[self];
}

}  // namespace emu

namespace gdn {

inline uint64_t l2_policy(bool) { return 0; }
inline uint4 load_stream(const void* address, uint64_t, bool valid) { return valid ? load_stream(address) : uint4{}; }
inline void store_stream(void* address, const uint4& x, uint64_t) { store_stream(address, x); }
inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier, uint64_t) { bulk_copy(to, from, bytes, barrier); }

inline void bulk_store(void* to, const void* from, int bytes, uint64_t) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(bytes)) % 16) std::abort();
  emu::bulk_stores().push_back({to, from, bytes});
}
inline void bulk_commit() { emu::bulk_stores().push_back({nullptr, nullptr, 0}); }
template <int N>
inline void bulk_wait_read() {
  auto& stores = emu::bulk_stores();
  int groups = 0;
  for (const auto& store : stores) groups += store.from == nullptr;
  for (; groups > N; stores.pop_front()) {
    const auto store = stores.front();
    if (store.from == nullptr)
      groups--;
    else
      std::memcpy(store.to, store.from, store.bytes);
  }
}

}  // namespace gdn
