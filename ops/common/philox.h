// Philox4x32-10: a counter-based random number generator (Salmon, Moraes, Dror, Shaw: "Parallel
// Random Numbers: As Easy as 1, 2, 3", SC 2011).
//
// A block of four 32-bit words is a pure function of a 64-bit key and a 128-bit counter, with no
// state between calls. gmeta uses it for initial rows: key = table seed, counter = (block, 0, low
// and high half of the row's key). So a row is the same on every rank, at every step, in any order
// of insertion.
//
// Blocks are computed kPhiloxLanes at a time, lane by lane in the innermost loop, which compilers
// turn into vector instructions; or eight at a time by AVX2, in less than half the time. On the GPU
// a thread computes one block.

#ifndef GMETA_OPS_COMMON_PHILOX_H_
#define GMETA_OPS_COMMON_PHILOX_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/host_device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gmeta {

inline constexpr size_t kPhiloxLanes = 4;
inline constexpr size_t kPhiloxWords = 4 * kPhiloxLanes;

struct PhiloxCounter {
  uint32_t words[4];
};

// Writes the blocks of counters (first.words[0] + lane, words[1], words[2], words[3]): word w of a
// lane's block is written to out[4 * lane + w].
template <size_t kLanes = kPhiloxLanes>
GMETA_HOST_DEVICE inline void Philox4x32(uint64_t key, const PhiloxCounter& first,
                                         uint32_t out[4 * kLanes]) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    c0[lane] = first.words[0] + static_cast<uint32_t>(lane);
    c1[lane] = first.words[1];
    c2[lane] = first.words[2];
    c3[lane] = first.words[3];
  }
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  // Unrolled, the lanes stay in registers. In a loop they would go to memory and back ten times,
  // which takes four times as long.
#if defined(__CUDA_ARCH__)
#pragma unroll
#elif !defined(__CUDACC__)
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t product0 = uint64_t{0xD2511F53} * c0[lane];
      const uint64_t product1 = uint64_t{0xCD9E8D57} * c2[lane];
      c0[lane] = static_cast<uint32_t>(product1 >> 32) ^ c1[lane] ^ k0;
      c1[lane] = static_cast<uint32_t>(product1);
      c2[lane] = static_cast<uint32_t>(product0 >> 32) ^ c3[lane] ^ k1;
      c3[lane] = static_cast<uint32_t>(product0);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    out[4 * lane + 0] = c0[lane];
    out[4 * lane + 1] = c1[lane];
    out[4 * lane + 2] = c2[lane];
    out[4 * lane + 3] = c3[lane];
  }
}

namespace portable {

// Not inlined, because in a caller's loop it takes half as long again.
__attribute__((noinline)) inline void PhiloxStream(uint64_t key, PhiloxCounter counter, size_t n,
                                                   uint32_t* out) {
  for (size_t i = 0; i < n; i += kPhiloxWords) {
    Philox4x32(key, counter, out + i);
    counter.words[0] += kPhiloxLanes;
  }
}

}  // namespace portable

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256i FourOf(uint32_t word) {
  return _mm256_set1_epi64x(static_cast<int64_t>(word));
}

// Two vectors of four blocks. A word is in the lower half of 64 bits; the upper half is arbitrary,
// until words are put together at the end.
__attribute__((target("avx2"))) inline void PhiloxStreamAvx2(uint64_t key, PhiloxCounter counter,
                                                             size_t n, uint32_t* out) {
  constexpr int kVectors = 2;
  const __m256i m0 = FourOf(0xD2511F53), m1 = FourOf(0xCD9E8D57), low = FourOf(0xffffffff);
  const __m256i lanes = _mm256_setr_epi64x(0, 1, 2, 3);
  for (size_t i = 0; i < n; i += 16 * kVectors) {
    __m256i c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) {
      c0[v] = _mm256_add_epi64(FourOf(counter.words[0] + 4 * v), lanes);
      c1[v] = FourOf(counter.words[1]);
      c2[v] = FourOf(counter.words[2]);
      c3[v] = FourOf(counter.words[3]);
    }
    counter.words[0] += 4 * kVectors;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#if !defined(__CUDACC__)
#pragma GCC unroll 10
#endif
    for (int round = 0; round < 10; ++round) {
      for (int v = 0; v < kVectors; ++v) {
        const __m256i product0 = _mm256_mul_epu32(m0, c0[v]);
        const __m256i product1 = _mm256_mul_epu32(m1, c2[v]);
        const __m256i key0 = _mm256_xor_si256(c1[v], FourOf(k0));
        const __m256i key1 = _mm256_xor_si256(c3[v], FourOf(k1));
        c0[v] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), key0);
        c2[v] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), key1);
        c1[v] = product1;
        c3[v] = product0;
      }
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    for (int v = 0; v < kVectors; ++v) {
      const __m256i first =
          _mm256_or_si256(_mm256_and_si256(c0[v], low), _mm256_slli_epi64(c1[v], 32));
      const __m256i second =
          _mm256_or_si256(_mm256_and_si256(c2[v], low), _mm256_slli_epi64(c3[v], 32));
      const __m256i even = _mm256_unpacklo_epi64(first, second);
      const __m256i odd = _mm256_unpackhi_epi64(first, second);
      auto* const to = reinterpret_cast<__m256i*>(out + i + 16 * v);
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
}

// Writes the words of the blocks of counters (counter.words[0] + i, words[1], words[2], words[3]),
// i = 0, 1, ..., one block after another: n words, or up to 31 more. words[0] must not overflow.
inline void PhiloxStream(uint64_t key, const PhiloxCounter& counter, size_t n, uint32_t* out) {
  static const bool avx2 = __builtin_cpu_supports("avx2");
  avx2 ? PhiloxStreamAvx2(key, counter, n, out) : portable::PhiloxStream(key, counter, n, out);
}

#else

using portable::PhiloxStream;

#endif

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_PHILOX_H_
