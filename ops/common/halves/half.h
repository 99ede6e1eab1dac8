// Converts arrays of float32 numbers to arrays of 16-bit ones (half_number.h) and back.
//
// float16 is converted by F16C if the processor has it, which is checked when the program runs, and
// else by integer arithmetic. A native test checks that the two give equal results.

#ifndef GMETA_OPS_COMMON_HALVES_HALF_H_
#define GMETA_OPS_COMMON_HALVES_HALF_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/halves/half_number.h"
#include "ops/common/vector_target.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gmeta {

namespace portable {

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
    // If one argument is NaN, min and max return the second one: NaNs stay.
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
  for (size_t i = 0; i < n; ++i) to[i] = ToBfloat(from[i]);
}

}  // namespace portable

GMETA_VECTOR_VERSIONS(ToBfloats, portable::ToBfloats, (const float* from, size_t n, uint16_t* to),
                      (from, n, to))
inline void FromBfloats(const uint16_t* from, size_t n, float* to) {
  for (size_t i = 0; i < n; ++i) to[i] = portable::FromBfloat(from[i]);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_HALVES_HALF_H_
