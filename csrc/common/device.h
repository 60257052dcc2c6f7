// Facts of the current device, asked for once: an attribute costs a microsecond, as much as a launch's other host work.
#pragma once
#include "params.h"

namespace gdn {

template <cudaDeviceAttr what>
int device_attribute() {
  constexpr int kDevices = 64;
  static int known[kDevices] = {};
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kDevices && known[device] != 0) return known[device];
  check(cudaDeviceGetAttribute(&value, what, device), "cudaDeviceGetAttribute");
  if (device < kDevices) known[device] = value;
  return value;
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }
inline int shared_bytes_at_most() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }

}  // namespace gdn
