// What the copy engine knows of a tensor when it copies boxes of it (tensor_copy in sm90_primitives.cuh): made on the host, passed
// to a kernel as part of a __grid_constant__ parameter. The driver's CUtensorMap, without the driver's header.
#pragma once
#include <cstdint>

namespace gdn {

struct alignas(128) TensorMap {
  uint64_t words[16];
};

}  // namespace gdn
