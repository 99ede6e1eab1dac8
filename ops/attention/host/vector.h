// Vectors of W floats, and the functions on them that attention needs: the exponential, the
// sigmoid.
//
// GCC's vector extension provides the operators. W is 16, 8 or 4, depending on the machine. So the
// code, written once here, becomes AVX-512, AVX2 or SSE if its caller is compiled for that (see
// ops/common/vector_target.h).

#ifndef GMETA_OPS_ATTENTION_HOST_VECTOR_H_
#define GMETA_OPS_ATTENTION_HOST_VECTOR_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/common/exponential.h"
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

// Multiplies numbers by a factor.
GMETA_ALWAYS_INLINE void Multiply(float* numbers, size_t size, float by) {
  for (size_t i = 0; i < size; ++i) numbers[i] *= by;
}

template <int W>
GMETA_ALWAYS_INLINE Floats<W> Exp(Floats<W> x) {
  return Exponential<Floats<W>, Integers<W>>(x);
}

template <int W>
GMETA_ALWAYS_INLINE Floats<W> Sigmoid(Floats<W> x) {
  return 1.0f / (1.0f + Exp<W>(-x));
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_VECTOR_H_
