// Eight neighbours of a row: the 16 bytes that a thread reads or writes at a time.

#ifndef GMETA_OPS_LAYER_EIGHT_CUH_
#define GMETA_OPS_LAYER_EIGHT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gmeta::hstu {

template <class T>
struct alignas(16) Eight {
  T numbers[8];

  static __device__ __forceinline__ Eight Load(const T* from) {
    return *reinterpret_cast<const Eight*>(from);
  }
  static __device__ __forceinline__ void Store(const float* from, T* to) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.numbers[i] = static_cast<T>(from[i]);
    *reinterpret_cast<Eight*>(to) = eight;
  }
  __device__ __forceinline__ float at(int i) const { return static_cast<float>(numbers[i]); }
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_EIGHT_CUH_
