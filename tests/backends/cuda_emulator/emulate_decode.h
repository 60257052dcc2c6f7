// State rows on their way, on a CPU: csrc/decode/sm90_stream.cuh says what each function does.
#pragma once
#include "emulate.h"

namespace gdn {

template <bool CACHED>
inline uint4 load_tile(const void* address, bool valid) { return valid ? load_stream(address) : uint4{}; }
inline void store_tile(void* address, const uint4& x, bool) { store_stream(address, x); }

}  // namespace gdn
