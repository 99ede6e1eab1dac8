// The gradients of a batch by distinct key: gradients of equal keys are summed before the optimizer
// sees them.

#ifndef GMETA_OPS_TABLE_HOST_DISTINCT_GRADIENTS_H_
#define GMETA_OPS_TABLE_HOST_DISTINCT_GRADIENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/partition.h"
#include "ops/unique/host/unique.h"

namespace gmeta {

// One gradient for each distinct key of a shard's items. For a key that occurs once, the usual
// case, this is the caller's own gradient; for a repeated key, it is the sum in the order of the
// batch.
class DistinctGradients {
 public:
  DistinctGradients(BatchItems items, const float* gradients, size_t dim)
      : items_(items), gradients_(gradients), dim_(dim) {
    std::vector<int64_t> keys(items.size);
    std::vector<int32_t> inverse(items.size);
    const size_t found = UniqueFinder().Find(
        items.size, [&](size_t i) { return items.data[i].key; }, keys.data(), inverse.data());
    if (found == items.size) return;
    distinct_.resize(found);
    sums_.resize((items.size - found) * dim);  // enough: a sum has at least two items
    std::vector<float*> sum_of(found, nullptr);
    float* next = sums_.data();
    source_.assign(found, nullptr);
    for (size_t i = 0; i < items.size; ++i) {
      const int32_t place = inverse[i];
      const float* gradient = gradients + items.data[i].position * dim;
      if (source_[place] == nullptr) {
        distinct_[place] = {keys[place], static_cast<uint32_t>(place)};
        source_[place] = gradient;
        continue;
      }
      if (sum_of[place] == nullptr) {
        sum_of[place] = std::copy_n(source_[place], dim, next) - dim;
        source_[place] = sum_of[place];
        next += dim;
      }
      for (size_t j = 0; j < dim; ++j) sum_of[place][j] += gradient[j];
    }
    items_ = {distinct_.data(), found};
  }

  BatchItems items() const { return items_; }
  const float* operator[](const BatchItem& item) const {
    return source_.empty() ? gradients_ + item.position * dim_ : source_[item.position];
  }

 private:
  BatchItems items_;
  const float* const gradients_;
  const size_t dim_;
  // Empty if no key occurs twice:
  std::vector<BatchItem> distinct_;
  std::vector<const float*> source_;
  std::vector<float> sums_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_DISTINCT_GRADIENTS_H_
