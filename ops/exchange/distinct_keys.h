// The distinct keys of several batches, each batch in parts, and the positions of the keys: the
// engine of both stages of deduplication (key_exchange.h).
//
// The keys of a batch are first sorted by part (partition.h). Then each part is made unique alone
// (unique.h). Equal keys are in one part, so the parts need no merging and can be processed
// together. The scratch table of a part is smaller than that of a batch, so it lies in a nearer
// cache. The result is ordered by part, then by first appearance: a function of the keys alone, not
// of threads.

#ifndef GMETA_OPS_EXCHANGE_DISTINCT_KEYS_H_
#define GMETA_OPS_EXCHANGE_DISTINCT_KEYS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/common/partition.h"
#include "ops/common/recycled.h"
#include "ops/unique/host/unique.h"

namespace gmeta {

class DistinctKeys {
 public:
  // Requires part_of(key) < parts, and fewer than 2^31 keys in all batches together. If `dedup` is
  // false, keys are only sorted by part.
  template <class PartOf, class ParallelFor>
  DistinctKeys(const std::vector<KeySpan>& batches, size_t parts, const PartOf& part_of, bool dedup,
               const ParallelFor& parallel_for)
      : partition_(batches, parts, part_of, parallel_for),
        batches_(batches.size()),
        parts_(parts),
        keys_(MakeRecycled<int64_t>(partition_.size())),
        places_(MakeRecycled<int32_t>(partition_.size())),
        found_(batches_ * parts),
        bases_(batches_ * parts) {
    ForParts(parallel_for, [&](UniqueFinder* finder, size_t place) {
      const BatchItems items = partition_[place];
      int64_t* keys = keys_.get() + partition_.start(place);
      int32_t* places = places_.get() + partition_.start(place);
      const auto key = [&items](size_t i) { return items.data[i].key; };
      if (dedup) {
        found_[place] = static_cast<int32_t>(finder->Find(items.size, key, keys, places));
        return;
      }
      for (size_t i = 0; i < items.size; ++i) keys[i] = key(i);
      std::iota(places, places + items.size, 0);
      found_[place] = static_cast<int32_t>(items.size);
    });
    for (size_t batch = 0; batch < batches_; ++batch) {
      const size_t first = batch * parts;
      std::partial_sum(found_.begin() + first, found_.begin() + first + parts - 1,
                       bases_.begin() + first + 1);
    }
  }

  size_t batches() const { return batches_; }
  size_t parts() const { return parts_; }

  // Number of keys in a part of a batch, in the parts before it, and in a whole batch.
  int32_t count(size_t batch, size_t part) const { return found_[batch * parts_ + part]; }
  int32_t base(size_t batch, size_t part) const { return bases_[batch * parts_ + part]; }
  int32_t count(size_t batch) const {
    const size_t last = (batch + 1) * parts_ - 1;
    return bases_[last] + found_[last];
  }

  // Writes for each batch its keys, and for each position the place of its key among them. For part
  // p of batch b it also calls also(b, p, keys), which may copy the keys to a second place.
  template <class Also, class ParallelFor>
  void Write(int64_t* const* keys, int32_t* const* inverse, const Also& also,
             const ParallelFor& parallel_for) const {
    ForParts(parallel_for, [&](UniqueFinder*, size_t place) {
      const size_t batch = place / parts_;
      const int32_t base = bases_[place];
      const int64_t* from = keys_.get() + partition_.start(place);
      std::copy_n(from, found_[place], keys[batch] + base);
      also(batch, place % parts_, from);
      const BatchItems items = partition_[place];
      const int32_t* places = places_.get() + partition_.start(place);
      int32_t* to = inverse[batch];
      for (size_t i = 0; i < items.size; ++i) to[items.data[i].position] = base + places[i];
    });
  }

 private:
  template <class ParallelFor, class Visit>
  void ForParts(const ParallelFor& parallel_for, const Visit& visit) const {
    const size_t count = batches_ * parts_;
    const size_t cost = count == 0 ? 1 : 1 + partition_.size() / count * 6;
    parallel_for(count, cost, [&](size_t first, size_t last) {
      UniqueFinder finder;
      for (size_t place = first; place < last; ++place) visit(&finder, place);
    });
  }

  Partition partition_;
  size_t batches_;
  size_t parts_;
  // From the start of a part's items in the partition: the part's keys, of which the first found_
  // are valid, and for each item the place of its key.
  Recycled<int64_t> keys_;
  Recycled<int32_t> places_;
  std::vector<int32_t> found_;
  std::vector<int32_t> bases_;  // how many keys of the same batch are in the parts before
};

}  // namespace gmeta

#endif  // GMETA_OPS_EXCHANGE_DISTINCT_KEYS_H_
