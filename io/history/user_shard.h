// Which shard of a store has a user's events.

#ifndef GMETA_IO_HISTORY_USER_SHARD_H_
#define GMETA_IO_HISTORY_USER_SHARD_H_

#include <cstdint>

namespace gmeta::history {

// Mixes the bits of a number (SplitMix64, Steele, Lea and Flood, 2014).
inline uint64_t SplitMix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Returns the shard of a user: shards are equal ranges of the users' hashes.
inline int64_t UserShard(int64_t user, int64_t shards) {
  const uint64_t high = SplitMix64(static_cast<uint64_t>(user)) >> 32;
  return static_cast<int64_t>((high * static_cast<uint64_t>(shards)) >> 32);
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_USER_SHARD_H_
