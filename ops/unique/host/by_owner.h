// Orders distinct keys by the rank that owns them. The keys of a rank keep their order.

#ifndef GMETA_OPS_UNIQUE_HOST_BY_OWNER_H_
#define GMETA_OPS_UNIQUE_HOST_BY_OWNER_H_

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/exchange/key_exchange.h"

namespace gmeta {

// Reorders `size` keys, and updates the indices inverse[i] for i < n. `counts` (ranks) becomes the
// number of keys that each rank owns.
inline void OrderByOwner(size_t ranks, int64_t* keys, size_t size, int32_t* inverse, size_t n,
                         int32_t* counts) {
  std::vector<int32_t> place(size);  // a key's owner, then its new place
  std::fill_n(counts, ranks, 0);
  for (size_t i = 0; i < size; ++i) {
    place[i] = static_cast<int32_t>(OwnerOf(MurmurHash3(keys[i]), ranks));
    ++counts[place[i]];
  }
  std::vector<int32_t> next(ranks);
  std::exclusive_scan(counts, counts + ranks, next.begin(), 0);
  const std::vector<int64_t> before(keys, keys + size);
  for (size_t i = 0; i < size; ++i) {
    place[i] = next[place[i]]++;
    keys[place[i]] = before[i];
  }
  for (size_t i = 0; i < n; ++i) inverse[i] = place[inverse[i]];
}

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_HOST_BY_OWNER_H_
