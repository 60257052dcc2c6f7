// State rows between memory and the accumulators of m16n8 products: lane 4 g + p of a warp holds rows g and g + 8 of its
// 16 V rows, columns 8 n + 2 p and 8 n + 2 p + 1 of tile n. The type is a fact of the call, so it is a switch around the
// loops: states move once a sequence and once a page.
#pragma once
#include "../common/numeric.cuh"

namespace gdn {

// Before sm_89 there are no instructions for fp8; the backend refuses such states there, and what would stand in for them
// takes more registers than there are.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kHasFp8 = false;
#else
constexpr bool kHasFp8 = true;
#endif

template <int N, class Function>
__device__ __forceinline__ void each_pair(float (&s)[N][4], const States& states, int64_t offset, Function&& function) {
  const int lane = threadIdx.x % 32;
  const int64_t row = offset + lane / 4 * states.v + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < N; n++) {
    function(s[n][0], s[n][1], row + 8 * n);
    function(s[n][2], s[n][3], row + 8 * states.v + 8 * n);
  }
}

template <__nv_fp8_interpretation_t kind>
__device__ __forceinline__ float2 from_fp8(__nv_fp8x2_storage_t x) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(x, kind);
  return __half22float2(__half2(raw));
}
template <__nv_fp8_interpretation_t kind>
__device__ __forceinline__ __nv_fp8x2_storage_t to_fp8(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, kind);
}

// `offset` is that of the warp's first row. Not aligned: rows may start at any element (padded pools).
template <int N>
__device__ __forceinline__ void load_states(float (&s)[N][4], const States& states, int64_t offset) {
  const auto pairs16 = [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(states.data);
    if (states.aligned) {
      each_pair(s, states, offset, [&](float& x, float& y, int64_t i) {
        const float2 pair = Pair<T>::unpack(*reinterpret_cast<const uint32_t*>(data + i));
        x = pair.x, y = pair.y;
      });
    } else {
      each_pair(s, states, offset, [&](float& x, float& y, int64_t i) { x = float(data[i]), y = float(data[i + 1]); });
    }
  };
  const auto pairs8 = [&](auto kind) {
    const auto* data = static_cast<const uint8_t*>(states.data);
    each_pair(s, states, offset, [&](float& x, float& y, int64_t i) {
      const float2 pair = from_fp8<decltype(kind)::value>(__nv_fp8x2_storage_t(data[i] | data[i + 1] << 8));
      x = pair.x, y = pair.y;
    });
  };
  switch (states.dtype) {
    case DType::f32: {
      const float* data = static_cast<const float*>(states.data);
      if (states.aligned) {
        each_pair(s, states, offset, [&](float& x, float& y, int64_t i) {
          const float2 pair = *reinterpret_cast<const float2*>(data + i);
          x = pair.x, y = pair.y;
        });
      } else {
        each_pair(s, states, offset, [&](float& x, float& y, int64_t i) { x = data[i], y = data[i + 1]; });
      }
      break;
    }
    case DType::bf16:
      pairs16(__nv_bfloat16());
      break;
    case DType::f16:
      pairs16(__half());
      break;
    case DType::e4m3:
      if constexpr (kHasFp8) pairs8(std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>());
      break;
    case DType::e5m2:
      if constexpr (kHasFp8) pairs8(std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>());
      break;
  }
}

template <int N>
__device__ __forceinline__ void store_states(float (&s)[N][4], const States& states, int64_t offset) {
  const auto pairs16 = [&](auto type) {
    using T = decltype(type);
    T* data = static_cast<T*>(states.data);
    if (states.aligned) {
      each_pair(s, states, offset, [&](float x, float y, int64_t i) { *reinterpret_cast<uint32_t*>(data + i) = Pair<T>::pack(x, y); });
    } else {
      each_pair(s, states, offset, [&](float x, float y, int64_t i) { data[i] = T(x), data[i + 1] = T(y); });
    }
  };
  const auto pairs8 = [&](auto kind) {
    auto* data = static_cast<uint8_t*>(states.data);
    each_pair(s, states, offset, [&](float x, float y, int64_t i) {
      const __nv_fp8x2_storage_t pair = to_fp8<decltype(kind)::value>(x, y);
      if (states.aligned) {
        *reinterpret_cast<uint16_t*>(data + i) = pair;
      } else {
        data[i] = uint8_t(pair), data[i + 1] = uint8_t(pair >> 8);
      }
    });
  };
  switch (states.dtype) {
    case DType::f32: {
      float* data = static_cast<float*>(states.data);
      if (states.aligned) {
        each_pair(s, states, offset, [&](float x, float y, int64_t i) { *reinterpret_cast<float2*>(data + i) = make_float2(x, y); });
      } else {
        each_pair(s, states, offset, [&](float x, float y, int64_t i) { data[i] = x, data[i + 1] = y; });
      }
      break;
    }
    case DType::bf16:
      pairs16(__nv_bfloat16());
      break;
    case DType::f16:
      pairs16(__half());
      break;
    case DType::e4m3:
      if constexpr (kHasFp8) pairs8(std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>());
      break;
    case DType::e5m2:
      if constexpr (kHasFp8) pairs8(std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>());
      break;
  }
}

}  // namespace gdn
