// Sorts the keys of batches by shard, stably and in parallel: count, prefix sums, scatter, over
// slices of the batches. Afterwards the keys of a batch in one shard stand together, so one worker
// can take all of them, alone, and the data that they lead to stays in a near cache.
//
// A parallel_for is anything callable as parallel_for(total, cost, work). It calls work(begin, end)
// for ranges that cover [0, total), together or one after another, and returns when all are done.
// cost is an estimate of the nanoseconds of one unit.

#ifndef GMETA_OPS_COMMON_PARTITION_H_
#define GMETA_OPS_COMMON_PARTITION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/common/recycled.h"

namespace gmeta {

// A key and its position in the batch.
struct BatchItem {
  int64_t key;
  uint32_t position;
};

struct BatchItems {
  const BatchItem* data;
  size_t size;
};

struct KeySpan {
  const int64_t* data;
  size_t size;
};

class Partition {
 public:
  // Requires shard_of(key) < shards, and fewer than 2^32 keys in all batches together.
  template <class ShardOf, class ParallelFor>
  Partition(const std::vector<KeySpan>& batches, size_t shards, const ShardOf& shard_of,
            const ParallelFor& parallel_for)
      : shards_(shards) {
    std::vector<Slice> slices;
    std::vector<size_t> first_slice;  // the first slice of each batch
    size_t n = 0;
    for (const KeySpan& batch : batches) {
      first_slice.push_back(slices.size());
      for (size_t begin = 0; begin < batch.size; begin += kSlice) {
        slices.push_back({batch.data, begin, std::min(batch.size, begin + kSlice)});
      }
      n += batch.size;
    }
    first_slice.push_back(slices.size());
    items_ = MakeRecycled<BatchItem>(n);

    // ends[slice][shard] is first a count, then the start of the slice's items of the shard, then
    // their end.
    std::vector<uint32_t> ends(slices.size() * shards, 0);
    const auto for_slices = [&](const auto& visit) {
      parallel_for(slices.size(), kSlice * 4, [&](size_t first, size_t last) {
        for (size_t slice = first; slice < last; ++slice) {
          uint32_t* row = ends.data() + slice * shards;
          const int64_t* keys = slices[slice].keys;
          for (size_t i = slices[slice].begin; i < slices[slice].end; ++i) visit(row, keys[i], i);
        }
      });
    };
    for_slices([&](uint32_t* counts, int64_t key, size_t) { ++counts[shard_of(key)]; });
    starts_.reserve(batches.size() * shards + 1);
    uint32_t total = 0;
    for (size_t batch = 0; batch < batches.size(); ++batch) {
      for (size_t shard = 0; shard < shards; ++shard) {
        starts_.push_back(total);
        for (size_t slice = first_slice[batch]; slice < first_slice[batch + 1]; ++slice) {
          uint32_t& entry = ends[slice * shards + shard];
          const uint32_t count = entry;
          entry = total;
          total += count;
        }
      }
    }
    starts_.push_back(total);
    for_slices([&](uint32_t* next, int64_t key, size_t i) {
      items_[next[shard_of(key)]++] = {key, static_cast<uint32_t>(i)};
    });
  }

  // Partitions one batch, by the top `log2_shards` bits of the hash.
  template <class ParallelFor>
  Partition(const int64_t* keys, size_t n, int log2_shards, const ParallelFor& parallel_for)
      // Two shifts: one shard has no bits, and a shift by 64 isn't allowed.
      : Partition(
            std::vector<KeySpan>{{keys, n}}, size_t{1} << log2_shards,
            [shift = 63 - log2_shards](int64_t key) {
              return static_cast<size_t>(MurmurHash3(key) >> 1 >> shift);
            },
            parallel_for) {}

  size_t shards() const { return shards_; }

  // Returns the items of shard `place % shards()` of batch `place / shards()`. `start` is how many
  // items come before them.
  BatchItems operator[](size_t place) const {
    return {items_.get() + starts_[place], starts_[place + 1] - starts_[place]};
  }
  size_t start(size_t place) const { return starts_[place]; }
  size_t size() const { return starts_.back(); }

 private:
  static constexpr size_t kSlice = 8192;

  struct Slice {
    const int64_t* keys;
    size_t begin;
    size_t end;
  };

  size_t shards_;
  Recycled<BatchItem> items_;
  std::vector<uint32_t> starts_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_PARTITION_H_
