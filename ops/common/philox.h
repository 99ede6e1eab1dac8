// Philox4x32-10: a counter-based random number generator (Salmon, Moraes, Dror, Shaw: "Parallel
// Random Numbers: As Easy as 1, 2, 3", SC 2011).
//
// A block of four 32-bit words is a pure function of a 64-bit key and a 128-bit counter, with no
// state between calls. gmeta uses it for initial rows: key = table seed, counter = (block, 0, low
// and high half of the row's key). So a row is the same on every rank, at every step, in any order
// of insertion.
//
// Blocks are computed kPhiloxLanes at a time, lane by lane in the innermost loop, which compilers
// turn into vector instructions. On the GPU a thread computes one block.

#ifndef GMETA_OPS_COMMON_PHILOX_H_
#define GMETA_OPS_COMMON_PHILOX_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/host_device.h"

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

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_PHILOX_H_
