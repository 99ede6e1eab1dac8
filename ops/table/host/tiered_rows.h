// TieredRows: the rows of a shard in memory and on disk, for passes that read records and change
// none: the part of the interface of rows.h that such passes use.
//
// A pass over many rows calls Load for some hundreds of them at a time, and their records are read
// together. A record that isn't loaded is read by itself.
//
// Not thread-safe, because it keeps what it has loaded.

#ifndef GMETA_OPS_TABLE_HOST_TIERED_ROWS_H_
#define GMETA_OPS_TABLE_HOST_TIERED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "ops/common/prefetch.h"
#include "ops/table/core/half_rule.h"
#include "ops/table/core/row_record.h"
#include "ops/table/host/disk_rows.h"

namespace gmeta {

template <class MemoryRows>
class TieredRows {
 public:
  TieredRows(const MemoryRows* memory, const DiskRows* disk, const RowLayout& layout)
      : memory_(memory), disk_(disk), bytes_(layout.bytes()) {}

  // Reads the records of those of n items that are on disk. An item has a `row`.
  template <class Item>
  void Load(const Item* items, size_t n) const {
    places_.clear();
    std::vector<DiskRows::Wish> wishes;
    for (size_t i = 0; i < n; ++i) {
      if (DiskRows::IsOnDisk(items[i].row)) wishes.push_back({items[i].row, nullptr});
    }
    records_.resize(wishes.size() * bytes_);
    for (size_t i = 0; i < wishes.size(); ++i) {
      wishes[i].to = records_.data() + i * bytes_;
      places_[wishes[i].row] = i;
    }
    disk_->Read(wishes);
  }

  bool IsHalf(uint32_t row) const { return HalfRule::IsHalf(row); }
  bool IsToBeHalf(RowHeader header, uint32_t step) const {
    return memory_->IsToBeHalf(header, step);
  }
  const RowHeader* header(uint32_t row) const {
    return DiskRows::IsOnDisk(row) ? disk_->header(row) : memory_->header(row);
  }
  void CopyWeights(uint32_t row, float* to) const {
    memory_->WeightsOf(Record(row), IsHalf(row), to);
  }
  void CopySlots(uint32_t row, float* to) const { memory_->SlotsOf(Record(row), IsHalf(row), to); }

  void PrefetchHeader(uint32_t row) const {
    if (!DiskRows::IsOnDisk(row)) memory_->PrefetchHeader(row);
  }
  template <Intent kIntent>
  void PrefetchRecord(uint32_t row) const {
    if (!DiskRows::IsOnDisk(row)) memory_->template PrefetchRecord<kIntent>(row);
  }

 private:
  char* Record(uint32_t row) const {
    if (!DiskRows::IsOnDisk(row)) return memory_->record(row);
    auto found = places_.find(row);
    if (found == places_.end()) {
      const struct {
        uint32_t row;
      } one = {row};
      Load(&one, 1);
      found = places_.find(row);
    }
    return records_.data() + found->second * bytes_;
  }

  const MemoryRows* memory_;
  const DiskRows* disk_;
  size_t bytes_;  // of the larger form
  mutable std::vector<char> records_;
  mutable std::unordered_map<uint32_t, size_t> places_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_TIERED_ROWS_H_
