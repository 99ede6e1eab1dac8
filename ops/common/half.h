// Float32 numbers in 16 bits, both rounded to nearest, ties to even.
//
//   float16 (IEEE binary16): 11 significant bits, magnitudes from 6.1e-5 to 65504 at full precision
//     and down to 6.0e-8 with less. For numbers near one. What is larger than 65504 becomes 65504,
//     so that one large number doesn't become an infinity for good.
//   bfloat16: 8 significant bits and the range of float32, so nothing under- or overflows.
//
// float16 is converted by F16C where the processor has it, found out when the program runs, and
// else by integer arithmetic; a native test holds the two equal. bfloat16 is the upper half of a
// float32.

#ifndef GMETA_OPS_COMMON_HALF_H_
#define GMETA_OPS_COMMON_HALF_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/common/vector_target.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

inline uint16_t ToHalf(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 0x477fe000) {
    half = 0x7bff;  // kLargestHalf
  } else if (magnitude < 0x38800000) {
    // Below 2^-14 a half has the unit 2^-24, which is that of floats near 1/2: adding rounds.
    half = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  } else {
    // Re-biases the exponent; half a unit, less one bit where the unit is even, rounds.
    half = (magnitude - (uint32_t{112} << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

inline float FromHalf(uint16_t half) {
  const uint32_t sign = uint32_t{half} << 16 & 0x80000000;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x0400) {  // a multiple of 2^-24
    return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * (1.0f / 16777216.0f)));
  }
  return FloatOf(sign | ((magnitude << 13) + (uint32_t{112} << 23)));
}

inline void ToHalves(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = ToHalf(from[i]);
}

inline void FromHalves(const uint16_t* from, size_t n, float* to) {
  for (size_t i = 0; i < n; ++i) to[i] = FromHalf(from[i]);
}

}  // namespace portable

#if defined(__x86_64__)

namespace f16c {

__attribute__((target("avx,f16c"))) inline void ToHalves(const float* from, size_t n,
                                                         uint16_t* to) {
  const __m256 high = _mm256_set1_ps(kLargestHalf);
  const __m256 low = _mm256_set1_ps(-kLargestHalf);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    // Of a NaN and a number, min and max give their second argument: NaNs stay.
    const __m256 x = _mm256_max_ps(low, _mm256_min_ps(high, _mm256_loadu_ps(from + i)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  portable::ToHalves(from + i, n - i, to + i);
}

__attribute__((target("avx,f16c"))) inline void FromHalves(const uint16_t* from, size_t n,
                                                           float* to) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  portable::FromHalves(from + i, n - i, to + i);
}

inline bool IsSupported() {
  static const bool supported = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return supported;
}

}  // namespace f16c

inline void ToHalves(const float* from, size_t n, uint16_t* to) {
  f16c::IsSupported() ? f16c::ToHalves(from, n, to) : portable::ToHalves(from, n, to);
}

inline void FromHalves(const uint16_t* from, size_t n, float* to) {
  f16c::IsSupported() ? f16c::FromHalves(from, n, to) : portable::FromHalves(from, n, to);
}

#else

using portable::FromHalves;
using portable::ToHalves;

#endif

namespace portable {

GMETA_ALWAYS_INLINE void ToBfloats(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = BitsOf(from[i]);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to[i] = static_cast<uint16_t>((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

}  // namespace portable

GMETA_VECTOR_VERSIONS(ToBfloats, portable::ToBfloats, (const float* from, size_t n, uint16_t* to),
                      (from, n, to))
inline void FromBfloats(const uint16_t* from, size_t n, float* to) {
  for (size_t i = 0; i < n; ++i) to[i] = portable::FloatOf(uint32_t{from[i]} << 16);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_HALF_H_
