// A hash of 64-bit numbers.

#ifndef GMETA_IO_RECORDS_SPLITMIX_H_
#define GMETA_IO_RECORDS_SPLITMIX_H_

#include <cstdint>

namespace gmeta::records {

// The odd number that SplitMix64 adds before it mixes.
inline constexpr uint64_t kSplitMixOdd = 0x9e3779b97f4a7c15u;

// Mixes the bits of a number (SplitMix64, Steele, Lea and Flood, 2014); a bijection.
inline uint64_t SplitMix64(uint64_t x) {
  x += kSplitMixOdd;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_SPLITMIX_H_
