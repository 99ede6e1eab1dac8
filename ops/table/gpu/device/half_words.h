// 16-bit numbers in pairs, as a GPU thread reads and writes them: a word holds two neighbouring
// elements of an array, the first in its lower half.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_HALF_WORDS_H_
#define GMETA_OPS_TABLE_GPU_DEVICE_HALF_WORDS_H_

#include <cstdint>

#include "ops/common/halves/half_number.h"
#include "ops/common/host_device.h"

namespace gmeta {

// The number formats of a half record (row_record.h): Float16 for weights, Bfloat16 for slots.
struct Float16 {
  GMETA_HOST_DEVICE static uint16_t Of(float x) { return portable::ToHalf(x); }
  GMETA_HOST_DEVICE static uint16_t Draw(float x, uint32_t random) {
    return portable::DrawHalf(x, random);
  }
  // One instruction, where the portable form takes a dozen: a lookup converts all that it reads.
  GMETA_HOST_DEVICE static float Value(uint16_t bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return portable::FromHalf(bits);
#endif
  }
};
struct Bfloat16 {
  GMETA_HOST_DEVICE static uint16_t Of(float x) { return portable::ToBfloat(x); }
  GMETA_HOST_DEVICE static uint16_t Draw(float x, uint32_t random) {
    return portable::DrawBfloat(x, random);
  }
  GMETA_HOST_DEVICE static float Value(uint16_t bits) { return portable::FromBfloat(bits); }
};

template <class Number>
GMETA_HOST_DEVICE inline uint32_t PairOf(float first, float second) {
  return uint32_t{Number::Of(first)} | uint32_t{Number::Of(second)} << 16;
}
template <class Number>
GMETA_HOST_DEVICE inline float FirstOf(uint32_t pair) {
  return Number::Value(static_cast<uint16_t>(pair));
}
template <class Number>
GMETA_HOST_DEVICE inline float SecondOf(uint32_t pair) {
  return Number::Value(static_cast<uint16_t>(pair >> 16));
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_HALF_WORDS_H_
