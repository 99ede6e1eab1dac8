// float16.

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_FP16_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_FP16_H_

#include <cmath>
#include <cstdint>

#include "ops/common/halves/half.h"

struct __half {
  __half() = default;
  explicit __half(float x)
      : bits(x != x || std::fabs(x) < 65520.0f ? gmeta::portable::ToHalf(x)
                                               : (std::signbit(x) ? 0xFC00 : 0x7C00)) {}
  explicit operator float() const { return gmeta::portable::FromHalf(bits); }
  uint16_t bits;
};

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_FP16_H_
