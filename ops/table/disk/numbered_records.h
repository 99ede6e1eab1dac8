// NumberedRecords: records of one size on a drive, in a log (record_log.h), by numbers that their
// owner chooses.
//
// Thread safety: const methods may run concurrently; all others need exclusive access.

#ifndef GMETA_OPS_TABLE_DISK_NUMBERED_RECORDS_H_
#define GMETA_OPS_TABLE_DISK_NUMBERED_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ops/table/disk/record_log.h"

namespace gmeta::disk {

class NumberedRecords {
 public:
  // A record to read: its number, and where to put it.
  struct Wish {
    uint32_t number;
    char* to;
  };

  NumberedRecords(std::string folder, size_t record_bytes)
      : log_(std::move(folder), record_bytes, kNone, kSegmentBytes) {}

  uint64_t size() const { return log_.size(); }
  uint64_t file_bytes() const { return log_.file_bytes(); }
  size_t memory_bytes() const { return log_.memory_bytes() + records_.capacity() * sizeof(Kept); }
  bool Has(uint32_t number) const {
    return number < records_.size() && records_[number].place != kNone;
  }
  // How often a record has been written with this number.
  uint32_t version(uint32_t number) const { return records_[number].version; }

  // Writes a record, replacing the one that has the number.
  void Put(uint32_t number, const char* record) {
    if (number >= records_.size()) records_.resize(number + 1);
    const uint32_t place =
        log_.Append(number, record, [this](int64_t other, uint32_t /*from*/, uint32_t to) {
          records_[static_cast<size_t>(other)].place = to;
        });
    Free(number);
    records_[number].place = place;
    ++records_[number].version;
  }
  // Forgets a record, if there is one.
  void Free(uint32_t number) {
    if (!Has(number)) return;
    log_.Free(records_[number].place);
    records_[number].place = kNone;
  }
  void Read(const std::vector<Wish>& wishes) const {
    std::vector<RecordLog::Wish> of_log;
    of_log.reserve(wishes.size());
    for (const Wish& wish : wishes) of_log.push_back({records_[wish.number].place, wish.to});
    log_.Read(&of_log);
  }
  void Clear() {
    log_.Clear();
    for (Kept& record : records_) record.place = kNone;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr size_t kSegmentBytes = size_t{256} << 10;  // of a write

  struct Kept {
    uint32_t place = kNone, version = 0;
  };

  RecordLog log_;
  std::vector<Kept> records_;  // by number
};

}  // namespace gmeta::disk

#endif  // GMETA_OPS_TABLE_DISK_NUMBERED_RECORDS_H_
