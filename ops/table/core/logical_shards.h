// Logical shards: the unit in which a table is saved, loaded and owned by ranks.
//
// A key's logical shard is the top ten bits of MurmurHash3(key), whatever the process, the rank or
// the number of ranks. A Table has fewer shards of its own and chooses them by fewer of the same
// bits, so each logical shard lies in one of the table's shards.

#ifndef GMETA_OPS_TABLE_CORE_LOGICAL_SHARDS_H_
#define GMETA_OPS_TABLE_CORE_LOGICAL_SHARDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/host_device.h"

namespace gmeta {

inline constexpr int kLog2LogicalShards = 10;
inline constexpr uint32_t kLogicalShards = uint32_t{1} << kLog2LogicalShards;

GMETA_HOST_DEVICE inline uint32_t LogicalShard(uint64_t hash) {
  return static_cast<uint32_t>(hash >> (64 - kLog2LogicalShards));
}

// Logical shards [first, last).
struct LogicalRange {
  uint32_t first;
  uint32_t last;

  GMETA_HOST_DEVICE uint32_t size() const { return last - first; }
  GMETA_HOST_DEVICE bool contains(uint32_t shard) const { return first <= shard && shard < last; }
};

// What to save of a range: the row number of each key, the removed keys, and the keys that wait for
// admission.
struct ShardSelection {
  struct Item {
    uint32_t logical;
    uint32_t row;
    int64_t key;
  };
  struct Removed {
    uint32_t logical;
    int64_t key;
  };
  struct Waiting {
    uint32_t logical;
    uint32_t count;
    int64_t key;
  };

  // Sorts by logical shard, then by key. This order depends on the content alone, not on history or
  // threads.
  void Sort() {
    const auto before = [](const auto& a, const auto& b) {
      return a.logical != b.logical ? a.logical < b.logical : a.key < b.key;
    };
    std::sort(items.begin(), items.end(), before);
    std::sort(removed.begin(), removed.end(), before);
    std::sort(waiting.begin(), waiting.end(), before);
  }

  std::vector<Item> items;
  std::vector<Removed> removed;
  std::vector<Waiting> waiting;
  bool journal_whole = true;  // `removed` has every key removed since the journal began
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_LOGICAL_SHARDS_H_
