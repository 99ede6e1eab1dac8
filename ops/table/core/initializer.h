// Initial rows: element j of a key's row is a pure function of (initializer, seed, key, j).
//
// Inversion turns word j % 4 of Philox block j / 4 under (seed, key) into element j, one word for
// one number. With x = (2 * (word >> 8) + 1 - 2^24) / 2^24, a multiple of 2^-24 in (-1, 1) that is
// symmetric and exact in float32:
//
//   uniform            low + (high - low) * (word >> 8) / 2^24
//
//   normal             mean + stddev * sqrt(2) * erfinv(x)                       |z| < 5.3
//
//   truncated normal   mean + stddev * sqrt(2) * erfinv(erf(sqrt(2)) * x)        |z| < 2
//
// The code uses only +, -, *, sqrt and integer operations of IEEE float32, in a fixed order and
// without fused multiply-add, so it gives the same bits on every machine, on the GPU, and in NumPy
// (tests/support/reference/table_rules.py). The loops have no branch, so they vectorize; the
// loop of the normal distributions is compiled for wide vectors too.
//
// erfinv is M. Giles' single-precision approximation ("Approximating the erfinv function", GPU
// Computing Gems, 2011), log is Cephes' logf; together they are within 4e-7 of the exact normal
// quantile, relatively.

#ifndef GMETA_OPS_TABLE_CORE_INITIALIZER_H_
#define GMETA_OPS_TABLE_CORE_INITIALIZER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/common/philox.h"
#include "ops/common/vector_target.h"

namespace gmeta {

// The natural logarithm of a positive normal number.
GMETA_ALWAYS_INLINE float NaturalLog(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t mantissa_bits = (bits & 0x007fffffu) | 0x3f000000u;  // in [0.5, 1)
  float m;
  std::memcpy(&m, &mantissa_bits, sizeof m);
  const bool low = m < 0.707106781186547524f;
  const float e = static_cast<float>(static_cast<int32_t>(bits >> 23) - 126) - (low ? 1.0f : 0.0f);
  m = (m - 1.0f) + (low ? m : 0.0f);
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z;
  p = p + e * -2.12194440e-4f;
  p = p - 0.5f * z;
  return (m + p) + e * 0.693359375f;
}

// The inverse of the error function, for |x| < 1.
GMETA_ALWAYS_INLINE float InverseErf(float x) {
  const float w = -NaturalLog((1.0f - x) * (1.0f + x));
  const float c = w - 2.5f;
  float center = 2.81022636e-08f;
  center = 3.43273939e-07f + center * c;
  center = -3.5233877e-06f + center * c;
  center = -4.39150654e-06f + center * c;
  center = 0.00021858087f + center * c;
  center = -0.00125372503f + center * c;
  center = -0.00417768164f + center * c;
  center = 0.246640727f + center * c;
  center = 1.50140941f + center * c;
  const float t = std::sqrt(w < 5.0f ? 5.0f : w) - 3.0f;
  float tail = -0.000200214257f;
  tail = 0.000100950558f + tail * t;
  tail = 0.00134934322f + tail * t;
  tail = -0.00367342844f + tail * t;
  tail = 0.00573950773f + tail * t;
  tail = -0.0076224613f + tail * t;
  tail = 0.00943887047f + tail * t;
  tail = 1.00167406f + tail * t;
  tail = 2.83297682f + tail * t;
  return (w < 5.0f ? center : tail) * x;
}

GMETA_ALWAYS_INLINE float UniformOf(uint32_t word, float low, float range) {
  constexpr float kUnit = 1.0f / 16777216.0f;  // 2^-24
  return low + range * (static_cast<float>(static_cast<int32_t>(word >> 8)) * kUnit);
}

GMETA_ALWAYS_INLINE float NormalOf(uint32_t word, float mean, float sigma, float scale) {
  constexpr float kUnit = 1.0f / 16777216.0f;  // 2^-24
  const int32_t odd = 2 * static_cast<int32_t>(word >> 8) + 1 - (1 << 24);
  return mean + sigma * InverseErf(scale * (static_cast<float>(odd) * kUnit));
}

// Computes out[i] = mean + sigma * erfinv(scale * x) for n words, x as above.
GMETA_ALWAYS_INLINE void NormalLoop(const uint32_t* words, size_t n, float mean, float sigma,
                                    float scale, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = NormalOf(words[i], mean, sigma, scale);
}

GMETA_VECTOR_VERSIONS(NormalFromWords, NormalLoop,
                      (const uint32_t* words, size_t n, float mean, float sigma, float scale,
                       float* out),
                      (words, n, mean, sigma, scale, out))

struct Initializer {
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal };

  Kind kind = Kind::kConstant;
  float a = 0.0f;  // the constant; low; mean
  float b = 0.0f;  // unused; high; stddev
  uint64_t seed = 0;

  // Writes the initial row of `key`: `dim` numbers.
  void Fill(int64_t key, size_t dim, float* row) const {
    if (kind == Kind::kConstant) {
      std::fill_n(row, dim, a);
      return;
    }
    uint32_t words[kPiece];
    for (size_t start = 0; start < dim; start += kPiece) {
      const size_t n = std::min(kPiece, dim - start);
      const uint64_t bits = static_cast<uint64_t>(key);
      PhiloxStream(seed,
                   {{static_cast<uint32_t>(start / 4), 0, static_cast<uint32_t>(bits),
                     static_cast<uint32_t>(bits >> 32)}},
                   n, words);
      Transform(words, n, row + start);
    }
  }

  // Computes elements 4 * block ... 4 * block + 3 of the row of `key`. For the GPU, where a thread
  // makes four.
  GMETA_HOST_DEVICE void Block(int64_t key, uint32_t block, float out[4]) const {
    if (kind == Kind::kConstant) {
      for (int i = 0; i < 4; ++i) out[i] = a;
      return;
    }
    const uint64_t bits = static_cast<uint64_t>(key);
    uint32_t words[4];
    Philox4x32<1>(
        seed, {{block, 0, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}}, words);
    for (int i = 0; i < 4; ++i) {
      out[i] = kind == Kind::kUniform ? UniformOf(words[i], a, b - a)
                                      : NormalOf(words[i], a, b * kSqrt2, scale());
    }
  }

 private:
  static constexpr size_t kPiece = 128;
  static constexpr float kSqrt2 = 1.41421356237309504880f;
  static_assert(kPiece % 32 == 0);  // PhiloxStream may write a few more words

  void Transform(const uint32_t* words, size_t n, float* out) const {
    if (kind == Kind::kUniform) {
      const float range = b - a;
      for (size_t i = 0; i < n; ++i) out[i] = UniformOf(words[i], a, range);
    } else {
      NormalFromWords(words, n, a, b * kSqrt2, scale(), out);
    }
  }

  GMETA_HOST_DEVICE float scale() const {
    constexpr float kTruncation = 0.95449973610364158f;  // erf(sqrt(2)): two standard deviations
    return kind == Kind::kTruncatedNormal ? kTruncation : 1.0f;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_INITIALIZER_H_
