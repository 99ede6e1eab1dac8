// Vectors of W floats, and the functions on them that attention needs: the exponential, the
// sigmoid.
//
// GCC's vector extension gives the operators. W is 16, 8 or 4, as the machine has it. So the code,
// written once here, becomes AVX-512, AVX2 or SSE if its caller is compiled for that (see
// ops/common/vector_target.h).

#ifndef GMETA_OPS_ATTENTION_HOST_VECTOR_H_
#define GMETA_OPS_ATTENTION_HOST_VECTOR_H_

#include <cstdint>
#include <cstring>

#include "ops/common/vector_target.h"

namespace gmeta::hstu {

template <int W>
struct Vector;

#define GMETA_VECTOR(W)                                           \
  template <>                                                     \
  struct Vector<W> {                                              \
    typedef float Floats __attribute__((vector_size(4 * W)));     \
    typedef int32_t Integers __attribute__((vector_size(4 * W))); \
  };
GMETA_VECTOR(4)
GMETA_VECTOR(8)
GMETA_VECTOR(16)
#undef GMETA_VECTOR

template <int W>
using Floats = typename Vector<W>::Floats;
template <int W>
using Integers = typename Vector<W>::Integers;

template <int W>
GMETA_ALWAYS_INLINE Floats<W> Load(const float* from) {
  Floats<W> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <int W>
GMETA_ALWAYS_INLINE void Store(float* to, Floats<W> x) {
  std::memcpy(to, &x, sizeof(x));
}

template <int W>
GMETA_ALWAYS_INLINE Floats<W> Broadcast(float x) {
  return Floats<W>{} + x;
}

// Returns the integers from `first` on.
template <int W>
GMETA_ALWAYS_INLINE Integers<W> Count(int32_t first) {
  Integers<W> x{};
  for (int lane = 0; lane < W; ++lane) x[lane] = first + lane;
  return x;
}

// Computes e^x to 2 units in the last place, for x up to 88; below -87 the result is 0 or less than
// 1e-38. The polynomial is that of Cephes' expf: x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is split
// in two parts, so that r is exact.
template <int W>
GMETA_ALWAYS_INLINE Floats<W> Exp(Floats<W> x) {
  // A comparison with NaN is false, so NaN stays.
  x = x > 88.0f ? Broadcast<W>(88.0f) : x;
  x = x < -87.0f ? Broadcast<W>(-87.0f) : x;
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const float kRound = 12582912.0f;
  const Floats<W> rounded = x * 1.44269504088896341f + kRound;
  const Floats<W> n = rounded - kRound;
  Floats<W> r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Integers<W> bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  Integers<W> power = (bits << 23) + 0x3f800000;  // 2^n: the bits above n are shifted out
  Floats<W> scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return p * scale;
}

template <int W>
GMETA_ALWAYS_INLINE Floats<W> Sigmoid(Floats<W> x) {
  return 1.0f / (1.0f + Exp<W>(-x));
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_VECTOR_H_
