// Numbers: conversions between what memory holds and the float32 that all arithmetic runs in, and the gates.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "params.h"

namespace gdn {

constexpr float kLog2e = 1.4426950408889634f;

// --- 16-bit pairs ------------------------------------------------------------------------------------------------

template <class T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    // A bf16 is the upper half of its float32.
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ float2 unpack(uint32_t x) { return __half22float2(*reinterpret_cast<__half2*>(&x)); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
};

// --- single values of a type known at the call -------------------------------------------------------------------

// As it lies in memory. Converted only where it is used: a conversion right behind its load would wait for it there, and the
// loads after it would wait too. One load for every type, of the aligned word that the value is in: of two predicated loads
// into one register the second waits for the first.
struct Bits {
  uint32_t word;
  uint32_t shift;
};

__device__ __forceinline__ Bits load_bits(const void* data, int64_t index, DType dtype) {
  const char* address = static_cast<const char*>(data) + (dtype == DType::f32 ? 4 : 2) * index;
  const uint32_t odd = uint32_t(reinterpret_cast<uintptr_t>(address)) & 2;
  return {*reinterpret_cast<const uint32_t*>(address - odd), odd * 8};
}

__device__ __forceinline__ float to_float(const Bits& bits, DType dtype) {
  const uint32_t x = bits.word >> bits.shift;
  return dtype == DType::f32    ? __uint_as_float(x)
         : dtype == DType::bf16 ? __uint_as_float(x << 16)
                                : __half2float(__ushort_as_half(uint16_t(x)));
}

__device__ __forceinline__ float load_float(const void* data, int64_t index, DType dtype) {
  return to_float(load_bits(data, index, dtype), dtype);
}

__device__ __forceinline__ float round_to(float x, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return x;
    case DType::bf16:
      return __bfloat162float(__float2bfloat16_rn(x));
    default:
      return __half2float(__float2half_rn(x));
  }
}

__device__ __forceinline__ int64_t load_index(const Index& index, int64_t i) {
  return index.wide ? static_cast<const int64_t*>(index.data)[i] : int64_t(static_cast<const int32_t*>(index.data)[i]);
}

// --- gates, in float32 with the accurate functions: a decay enters every later state -------------------------------

__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// log(alpha) of a raw gate: -exp(A_log) * softplus(g + dt_bias), at most 0.
__device__ __forceinline__ float raw_gate(float g, float A_log, float dt_bias) {
  return -expf(A_log) * softplus(g + dt_bias);
}

// The quotient is within two units of the last place, without the detour that an exact one takes for denormals; 1 / inf is 0.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// 1 / sqrt(sum + 1e-6), the factor of the L2 norm.
__device__ __forceinline__ float norm_factor(float sum) { return rsqrtf(sum + 1e-6f); }

}  // namespace gdn
