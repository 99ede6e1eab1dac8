// A row of float32 numbers as float16 numbers that share a power of two of their own. So rows of
// any magnitude keep float16's precision: gradients that are sums over samples, or that are almost
// zero.
//
// A row of n numbers x takes n + 1 halves:
//
//     e | x[0] / 2^e | ... | x[n - 1] / 2^e
//
//   e is a whole number in [-126, 112], which a half holds exactly. It is chosen so that the row's
//   largest finite number becomes one of [2^15, 2^16), the last binade of a float16. An e below
//   -126 isn't needed: a row that small falls into the middle of float16's range. A row without a
//   finite number other than zero has e = 0.
//
// Precision
//   A number that is at least 2^-29 of the row's largest has a relative error of at most 2^-11. A
//   smaller one has an absolute error of at most 2^-40 of the largest. Dividing by a power of two
//   is exact. Infinities and NaNs stay what they are, and don't affect e. A number below 2^-126,
//   the smallest normal float32, becomes zero, at the sender and at the receiver: TensorFlow's
//   threads may treat it as zero, and the bits must not depend on which thread does the work.
//
// Why it is fast
//   The largest number is found by integer comparison, without branches: the bits of positive
//   floats are in the order of the floats. The row is then still in the first cache when it is
//   divided, and half.h converts it, a block at a time.

#ifndef GMETA_OPS_COMMON_HALVES_SCALED_HALF_H_
#define GMETA_OPS_COMMON_HALVES_SCALED_HALF_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/common/halves/half.h"
#include "ops/common/vector_target.h"

namespace gmeta {

namespace scaled_half {

inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;
inline constexpr uint32_t kSmallestNormal = 0x00800000;
inline constexpr size_t kBlock = 256;

// Finds the bits of the largest magnitude. Infinities and NaNs give bits that no finite number has.
GMETA_ALWAYS_INLINE void Find(const float* from, size_t n, uint32_t* largest) {
  uint32_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    found = std::max(found, portable::BitsOf(from[i]) & kMagnitude);
  }
  *largest = found;
}

// Sets to[i] = from[i] * factor. A number below the smallest normal one counts as zero with its
// sign, before and after the product.
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

// Returns the bits of the largest finite magnitude, for a row that has infinities or NaNs.
inline uint32_t LargestFinite(const float* from, size_t n) {
  uint32_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = portable::BitsOf(from[i]) & kMagnitude;
    if (bits < kInfinity) found = std::max(found, bits);
  }
  return found;
}

// Returns e for a row whose largest finite magnitude has these bits.
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
    ToHalves(block, size, to + done);  // just below 2^16, saturation rounds to the nearest
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
  // An exponent that no sender can have written makes the row NaN, so that the error shows.
  const bool good = exponent >= -126 && exponent <= 112;
  const float factor =
      good ? PowerOfTwo(static_cast<int>(exponent)) : portable::FloatOf(0x7fc00000);
  MultiplyNormal(to, n, factor, to);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_HALVES_SCALED_HALF_H_
