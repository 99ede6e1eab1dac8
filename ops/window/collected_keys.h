// The distinct keys that an owner has received in several classes (key_classes.h), and the place
// among them of each key that was received.
//
// A class comes as its distinct keys and, for each key in the order of its arrival, the position
// among these. Different ranks may send a key in different classes, so the keys of all classes are
// made unique together (unique.h), in the order of their first appearance. A received key's place
// is then that of its class's key: one gather a class, from numbers that stand together.

#ifndef GMETA_OPS_WINDOW_COLLECTED_KEYS_H_
#define GMETA_OPS_WINDOW_COLLECTED_KEYS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/partition.h"
#include "ops/common/recycled.h"
#include "ops/unique/host/parallel_unique.h"
#include "ops/window/key_classes.h"

namespace gmeta {

class CollectedKeys {
 public:
  // Requires fewer than 2^31 keys in all classes.
  template <class ParallelFor>
  CollectedKeys(const std::vector<KeySpan>& classes, const ParallelFor& parallel_for) {
    size_t n = 0;
    for (const KeySpan& each : classes) {
      starts_.push_back(n);
      n += each.size;
    }
    starts_.push_back(n);
    const auto ids = MakeRecycled<int64_t>(n);
    int64_t* next = ids.get();
    for (const KeySpan& each : classes) next = std::copy_n(each.data, each.size, next);
    keys_ = MakeRecycled<int64_t>(n);
    places_ = MakeRecycled<int32_t>(n);
    found_ = FindUnique(ids.get(), n, keys_.get(), places_.get(), parallel_for);
  }

  size_t size() const { return found_; }
  const int64_t* keys() const { return keys_.get(); }

  // Writes the place of each received key of a class. Returns false if a position isn't that of a
  // key.
  bool WritePlaces(size_t each, const PlaceSpan& positions, int32_t* to) const {
    const int32_t* places = places_.get() + starts_[each];
    const size_t size = starts_[each + 1] - starts_[each];
    for (size_t i = 0; i < positions.size; ++i) {
      const size_t position =
          static_cast<size_t>(positions.data[i]);  // a negative one is too large
      if (position >= size) return false;
      to[i] = places[position];
    }
    return true;
  }

 private:
  std::vector<size_t> starts_;
  size_t found_ = 0;
  Recycled<int64_t> keys_;
  Recycled<int32_t> places_;  // of each class's keys, one class after another
};

}  // namespace gmeta

#endif  // GMETA_OPS_WINDOW_COLLECTED_KEYS_H_
