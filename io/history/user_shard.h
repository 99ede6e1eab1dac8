// Which shard of a store has a user's events.

#ifndef GMETA_IO_HISTORY_USER_SHARD_H_
#define GMETA_IO_HISTORY_USER_SHARD_H_

#include <cstdint>

#include "ops/common/splitmix.h"

namespace gmeta::history {

// Returns the shard of a user: shards are equal ranges of the users' hashes.
inline int64_t UserShard(int64_t user, int64_t shards) {
  const uint64_t high = SplitMix64(static_cast<uint64_t>(user)) >> 32;
  return static_cast<int64_t>((high * static_cast<uint64_t>(shards)) >> 32);
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_USER_SHARD_H_
