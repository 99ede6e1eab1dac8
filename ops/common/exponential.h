// e^x by additions, multiplications and shifts alone, so that it has the same bits in any vector,
// on the CPU and on the GPU, as long as the compiler fuses none of them (-ffp-contract=off for g++,
// -fmad=false for nvcc).

#ifndef GMETA_OPS_COMMON_EXPONENTIAL_H_
#define GMETA_OPS_COMMON_EXPONENTIAL_H_

#include <cstdint>
#include <cstring>

#include "ops/common/vector_target.h"

namespace gmeta {

// Computes e^x to 2 units in the last place, for x up to 88; below -87 the result is 0 or less than
// 1e-38. Floats is float and Integers uint32_t, or they are vectors of GCC's extension with as
// many elements. The polynomial is that of Cephes' expf: x = n ln 2 + r with |r| <= ln 2 / 2. ln 2
// is split in two parts, so that r is exact.
template <class Floats, class Integers>
GMETA_ALWAYS_INLINE Floats Exponential(Floats x) {
  // A comparison with NaN is false, so NaN stays.
  x = x > 88.0f ? Floats{} + 88.0f : x;
  x = x < -87.0f ? Floats{} + -87.0f : x;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const float kRound = 12582912.0f;
  const Floats rounded = x * 1.44269504088896341f + kRound;
  const Floats n = rounded - kRound;
  Floats r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Integers bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  const Integers power = (bits << 23) + 0x3f800000;  // 2^n: the bits above n are shifted out
  Floats scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return p * scale;
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_EXPONENTIAL_H_
