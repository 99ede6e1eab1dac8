// The distinct keys of a batch, in the order of their first appearance, and for each position the
// place of its key among them: keys[inverse[i]] == ids[i].
//
// One pass over a scratch table of 32-bit places, which is at most half full and uses linear
// probing. A slot holds no key, only the key's place among those found: 4 bytes a slot keep the
// scratch of a batch of 65,536 ids in half a megabyte, near the core. Ids are hashed a few
// positions ahead, and their slots prefetched.

#ifndef GMETA_OPS_UNIQUE_HOST_UNIQUE_H_
#define GMETA_OPS_UNIQUE_HOST_UNIQUE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/common/murmur_hash3.h"
#include "ops/common/prefetch.h"
#include "ops/common/recycled.h"

namespace gmeta {

// Finds distinct keys. It is reusable: it keeps the scratch between calls.
class UniqueFinder {
 public:
  // Requires id(i), the i-th id, for i < n < 2^31, and room for n numbers in `keys` and `inverse`.
  // Returns the number of keys.
  template <class Id>
  size_t Find(size_t n, const Id& id, int64_t* keys, int32_t* inverse) {
    size_t slots = 16;
    while (slots < 2 * n) slots *= 2;
    if (slots > capacity_) {
      slots_ = MakeRecycled<int32_t>(slots);
      capacity_ = slots;
    }
    std::fill_n(slots_.get(), slots, kEmpty);
    const size_t mask = slots - 1;

    size_t found = 0;
    size_t homes[kAhead];
    for (size_t i = 0; i < std::min(n, kAhead); ++i) homes[i] = MurmurHash3(id(i)) & mask;
    for (size_t i = 0; i < n; ++i) {
      size_t at = homes[i % kAhead];
      if (i + kAhead < n) {
        const size_t home = MurmurHash3(id(i + kAhead)) & mask;
        homes[i % kAhead] = home;
        Prefetch(&slots_[home]);
      }
      const int64_t key = id(i);
      while (slots_[at] != kEmpty && keys[slots_[at]] != key) at = (at + 1) & mask;
      if (slots_[at] == kEmpty) {
        slots_[at] = static_cast<int32_t>(found);
        keys[found++] = key;
      }
      inverse[i] = slots_[at];
    }
    return found;
  }

 private:
  static constexpr int32_t kEmpty = -1;
  static constexpr size_t kAhead = 16;

  Recycled<int32_t> slots_;
  size_t capacity_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_HOST_UNIQUE_H_
