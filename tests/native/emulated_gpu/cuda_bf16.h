// bfloat16.

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_BF16_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_BF16_H_

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    if (x != x) {
      bits = 0x7FFF;
    } else {
      bits = static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
    }
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }
  uint16_t bits;
};

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_BF16_H_
