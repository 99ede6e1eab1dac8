// A row of float32 numbers as float16 numbers with a power of two of their own, so that rows of any
// magnitude keep float16's precision: gradients that are sums over samples, or that are all but
// zero.
//
// The form of a row of n numbers x, in n + 1 halves:
//
//     e | x[0] / 2^e | ... | x[n - 1] / 2^e
//
//   e is a whole number in [-126, 112], which a half holds exactly. It is chosen so that the row's
//   largest finite number becomes one of [2^15, 2^16), the last binade of a float16. Below -126 it
//   isn't needed: a row so small comes to lie in the middle of float16's range. A row without a
//   finite number other than zero has e = 0.
//
// What is kept
//   A number that is at least 2^-29 of the row's largest has a relative error of at most 2^-11, a
//   smaller one an absolute error of at most 2^-40 of the largest. Dividing by a power of two is
//   exact. Infinities and NaNs stay what they are, and don't matter to e. A number below 2^-126,
//   the smallest normal float32, becomes zero, at either end: TensorFlow's threads may take it for
//   zero, and the bits are not to depend on whose thread it is.
//
// Why it is fast
//   The largest number is found as an integer, since the bits of positive floats are in the order
//   of the floats, and without branches; the row is then still in the first cache when it is
//   divided, and converted by half.h, a block at a time.

#ifndef GMETA_OPS_COMMON_SCALED_HALF_H_
#define GMETA_OPS_COMMON_SCALED_HALF_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/common/half.h"
#include "ops/common/vector_target.h"

namespace gmeta {

namespace scaled_half {

inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;
inline constexpr uint32_t kSmallestNormal = 0x00800000;
inline constexpr size_t kBlock = 256;

// The bits of the largest magnitude, which of infinities and NaNs are those of no number.
GMETA_ALWAYS_INLINE void Find(const float* from, size_t n, uint32_t* largest) {
  uint32_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    found = std::max(found, portable::BitsOf(from[i]) & kMagnitude);
  }
  *largest = found;
}

// to[i] = from[i] * factor, where what is below the smallest normal number counts as zero of its
// sign, before and after.
GMETA_ALWAYS_INLINE void Multiply(const float* from, size_t n, float factor, float* to) {
  const auto normal = [](float x) {
    const uint32_t bits = portable::BitsOf(x);
    return portable::FloatOf((bits & kMagnitude) < kSmallestNormal ? bits & ~kMagnitude : bits);
  };
  for (size_t i = 0; i < n; ++i) to[i] = normal(normal(from[i]) * factor);
}

GMETA_VECTOR_VERSIONS(FindLargest, Find, (const float* from, size_t n, uint32_t* largest),
                      (from, n, largest))
GMETA_VECTOR_VERSIONS(MultiplyNormal, Multiply,
                      (const float* from, size_t n, float factor, float* to), (from, n, factor, to))

// Of the finite ones alone, for a row that has others.
inline uint32_t LargestFinite(const float* from, size_t n) {
  uint32_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = portable::BitsOf(from[i]) & kMagnitude;
    if (bits < kInfinity) found = std::max(found, bits);
  }
  return found;
}

// e for a row whose largest finite magnitude has these bits.
inline int ExponentFor(uint32_t bits) {
  if (bits < kSmallestNormal) return 0;
  return std::max(static_cast<int>(bits >> 23) - 127 - 15, -126);
}

inline float PowerOfTwo(int exponent) {
  return portable::FloatOf(static_cast<uint32_t>(exponent + 127) << 23);
}

}  // namespace scaled_half

// Writes 1 + n halves.
inline void ToScaledHalves(const float* from, size_t n, uint16_t* to) {
  using namespace scaled_half;
  uint32_t largest;
  FindLargest(from, n, &largest);
  const bool finite = largest < kInfinity;
  const int exponent = ExponentFor(finite ? largest : LargestFinite(from, n));
  *to++ = portable::ToHalf(static_cast<float>(exponent));
  const float factor = PowerOfTwo(-exponent);
  float block[kBlock];
  for (size_t done = 0; done < n; done += kBlock) {
    const size_t size = std::min(kBlock, n - done);
    MultiplyNormal(from + done, size, factor, block);
    ToHalves(block, size, to + done);  // just below 2^16, saturation is to the nearest
  }
  if (finite) return;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = portable::BitsOf(from[i]);
    if ((bits & kMagnitude) == kInfinity)
      to[i] = static_cast<uint16_t>(bits >> 16 & 0x8000) | 0x7c00;
  }
}

// Reads 1 + n halves.
inline void FromScaledHalves(const uint16_t* from, size_t n, float* to) {
  using namespace scaled_half;
  const float exponent = portable::FromHalf(*from++);
  FromHalves(from, n, to);
  // What no sender can have meant becomes NaN, which is noticed.
  const bool good = exponent >= -126 && exponent <= 112;
  const float factor =
      good ? PowerOfTwo(static_cast<int>(exponent)) : portable::FloatOf(0x7fc00000);
  MultiplyNormal(to, n, factor, to);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_SCALED_HALF_H_
