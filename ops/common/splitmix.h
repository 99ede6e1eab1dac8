// SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words that mixes their bits.

#ifndef GMETA_OPS_COMMON_SPLITMIX_H_
#define GMETA_OPS_COMMON_SPLITMIX_H_

#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta {

// The odd number that SplitMix64 adds before it mixes.
inline constexpr uint64_t kSplitMixOdd = 0x9e3779b97f4a7c15u;

GMETA_HOST_DEVICE inline uint64_t SplitMix64(uint64_t x) {
  x += kSplitMixOdd;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_SPLITMIX_H_
