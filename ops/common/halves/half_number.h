// Float32 numbers in 16 bits, rounded to nearest, ties to even; or rounded at random.
//
//   float16 (IEEE binary16): 11 significant bits, magnitudes from 6.1e-5 to 65504 at full precision
//     and down to 6.0e-8 with less. For numbers near one. Larger numbers than 65504 become 65504,
//     so that one large number doesn't become an infinity for good.
//   bfloat16: 8 significant bits and the range of float32, so nothing under- or overflows. It is
//     the upper half of a float32.
//
// Rounded at random (Draw...), a number between two 16-bit ones becomes one of them, each with a
// probability of one less its distance, in units of theirs: the mean is the number itself. A draw
// takes 16 random bits. The probabilities are exact for bfloat16 and for float16 at full precision;
// below, they are multiples of 2^-16. Numbers that 16 bits can hold stay as they are, and numbers
// beyond the range become what they become when rounded to nearest.
//
// These functions convert one number at a time, by integer arithmetic, on the CPU and on the GPU:
// both get the same bits.

#ifndef GMETA_OPS_COMMON_HALVES_HALF_NUMBER_H_
#define GMETA_OPS_COMMON_HALVES_HALF_NUMBER_H_

#include <cstdint>
#include <cstring>

#include "ops/common/host_device.h"
#include "ops/common/vector_target.h"

namespace gmeta {

inline constexpr float kLargestHalf = 65504.0f;

namespace portable {

GMETA_ALWAYS_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

GMETA_ALWAYS_INLINE float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

GMETA_HOST_DEVICE inline uint16_t ToHalf(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477fe000) {
    half = 0x7bff;  // kLargestHalf
  } else if (magnitude < 0x38800000) {
    // Below 2^-14 a half has the unit 2^-24, which is also the unit of floats near 1/2: adding
    // rounds.
    half = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  } else {
    // Re-biases the exponent; half a unit, less one bit where the unit is even, rounds.
    half = (magnitude - (uint32_t{112} << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

GMETA_HOST_DEVICE inline float FromHalf(uint16_t half) {
  const uint32_t sign = uint32_t{half} << 16 & 0x80000000;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x0400) {  // a multiple of 2^-24
    return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * (1.0f / 16777216.0f)));
  }
  return FloatOf(sign | ((magnitude << 13) + (uint32_t{112} << 23)));
}

GMETA_ALWAYS_INLINE uint16_t ToBfloat(float x) {
  const uint32_t bits = BitsOf(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds at random by 16 random bits. It has no branch, so that loops vectorize.
GMETA_ALWAYS_INLINE uint16_t DrawHalf(float x, uint32_t random) {
  constexpr uint32_t kSmallest = 0x38800000;  // 2^-14, the smallest at full precision
  constexpr uint32_t kLargest = 0x477fe000;   // kLargestHalf
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t is_small = uint32_t{0} - uint32_t{magnitude < kSmallest};  // all bits, or none
  // Below 2^-14, in units of 2^-40: 16 bits more than a half has.
  const uint32_t low = magnitude < kSmallest ? magnitude : kSmallest;
  const auto units = static_cast<uint32_t>(static_cast<int32_t>(FloatOf(low) * 1099511627776.0f));
  const uint32_t below = (units + (random & is_small)) >> 16;
  // From 2^-14 on, what the exponent and the higher bits add to that.
  const uint32_t high = (magnitude < kLargest ? magnitude : kLargest) - low;
  const uint32_t above = (high + (random >> 3 & ~is_small)) >> 13;
  const uint32_t nan = uint32_t{magnitude > 0x7f800000} * 0x0201;  // 0x7e00 with the others
  return static_cast<uint16_t>(sign | (below + above + nan));
}

GMETA_ALWAYS_INLINE uint16_t DrawBfloat(float x, uint32_t random) {
  const uint32_t bits = BitsOf(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((nan ? bits | 0x400000 : bits + random) >> 16);
}

GMETA_ALWAYS_INLINE float FromBfloat(uint16_t bfloat) { return FloatOf(uint32_t{bfloat} << 16); }

}  // namespace portable

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_HALVES_HALF_NUMBER_H_
