// Sorts the keys of a batch by shard, stably and in parallel: count, prefix sums, scatter, over
// slices of the batch. Afterwards each shard's keys stand together, so a shard is locked once for a
// batch, by one worker, and its part of the index is walked while it is near.
//
// A parallel_for is anything callable as parallel_for(total, cost, work): it calls work(begin, end)
// for ranges that cover [0, total), together or one after another, and returns when all are done;
// cost is a guess of the nanoseconds of one unit.

#ifndef GMETA_OPS_HASH_TABLE_PARTITION_H_
#define GMETA_OPS_HASH_TABLE_PARTITION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/common/murmur_hash3.h"

namespace gmeta {

// A key and where it stands in the batch.
struct BatchItem {
  int64_t key;
  uint32_t position;
};

struct BatchItems {
  const BatchItem* data;
  size_t size;
};

class Partition {
 public:
  // Shards are the top `log2_shards` bits of the hash; n < 2^32.
  template <class ParallelFor>
  Partition(const int64_t* keys, size_t n, int log2_shards, const ParallelFor& parallel_for)
      : shift_(64 - log2_shards), shards_(size_t{1} << log2_shards), items_(new BatchItem[n]) {
    const size_t slices = (n + kSlice - 1) / kSlice;
    // ends[slice][shard]: first a count, then where the slice's items of the shard begin, then end.
    std::vector<uint32_t> ends(slices * shards_, 0);
    const auto for_slices = [&](const auto& visit) {
      parallel_for(slices, kSlice * 4, [&](size_t first, size_t last) {
        for (size_t slice = first; slice < last; ++slice) {
          uint32_t* row = ends.data() + slice * shards_;
          const size_t end = std::min(n, (slice + 1) * kSlice);
          for (size_t i = slice * kSlice; i < end; ++i) visit(row, i);
        }
      });
    };
    for_slices([&](uint32_t* counts, size_t i) { ++counts[ShardOf(keys[i])]; });
    starts_.resize(shards_ + 1);
    uint32_t total = 0;
    for (size_t shard = 0; shard < shards_; ++shard) {
      starts_[shard] = total;
      for (size_t slice = 0; slice < slices; ++slice) {
        uint32_t& entry = ends[slice * shards_ + shard];
        const uint32_t count = entry;
        entry = total;
        total += count;
      }
    }
    starts_[shards_] = total;
    for_slices([&](uint32_t* next, size_t i) {
      items_[next[ShardOf(keys[i])]++] = {keys[i], static_cast<uint32_t>(i)};
    });
  }

  size_t shards() const { return shards_; }
  BatchItems operator[](size_t shard) const {
    return {items_.get() + starts_[shard], starts_[shard + 1] - starts_[shard]};
  }

 private:
  static constexpr size_t kSlice = 8192;

  // shift_ may be 64: one shard.
  size_t ShardOf(int64_t key) const {
    return shards_ == 1 ? 0 : static_cast<size_t>(MurmurHash3(key) >> shift_);
  }

  int shift_;
  size_t shards_;
  std::unique_ptr<BatchItem[]> items_;  // not a vector: nothing is to be zeroed
  std::vector<uint32_t> starts_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TABLE_PARTITION_H_
