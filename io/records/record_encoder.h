// Encodes rows of columns as a block of framed records, and notes the groups in it: the part that
// both layouts share.
//
// A layout defines how some rows become a record's payload (Append). This class frames the payload
// and keeps the block. For each group it notes how many bytes of the file it takes, and the CRC of
// its payloads, joined. An index is made of that. If a group is one record, the CRC costs nothing,
// because the frame stores the same one. If a group is many records, the CRC is continued over each
// of them.

#ifndef GMETA_IO_RECORDS_RECORD_ENCODER_H_
#define GMETA_IO_RECORDS_RECORD_ENCODER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "io/records/column.h"
#include "io/records/tfrecord.h"
#include "ops/common/crc32c.h"

namespace gmeta::records {

// Returns the places of columns in the order of their names. Records hold them in that order: equal
// rows have one encoding, whatever the order of the schema.
inline std::vector<size_t> ByName(const std::vector<ColumnSpec>& columns) {
  std::vector<size_t> order(columns.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return columns[a].name < columns[b].name; });
  return order;
}

// Borrowed arrays, one element per group. Group g holds the rows from ends[g - 1] (0 for the first
// one) to ends[g] - 1. The size of its written records is added to bytes[g], and the CRC of their
// payloads to crcs[g], if these aren't null. If a part of a group was written before, pass that
// part's values in them; else zeros.
struct GroupRuns {
  const int64_t* ends = nullptr;
  int64_t count = 0;
  int64_t* bytes = nullptr;
  uint32_t* crcs = nullptr;
};

class RecordEncoder {
 public:
  virtual ~RecordEncoder() = default;

  // Encodes rows from `first` on into data(), until none are left or at least `limit` bytes are
  // written. Returns the first row that wasn't encoded. `views` are in the schema's order.
  int64_t Encode(const ColumnView* views, int64_t first, const GroupRuns& groups, size_t limit) {
    used_ = 0;
    const int64_t* end = std::upper_bound(groups.ends, groups.ends + groups.count, first);
    int64_t row = first;
    for (; end != groups.ends + groups.count && used_ < limit; end += row == *end) {
      const size_t start = used_;
      row = Append(views, row, *end);
      const size_t payload = used_ - start - kHeaderBytes - kFooterBytes;
      const char* data = buffer_.data() + start + kHeaderBytes;
      const uint32_t crc = Crc32c(data, payload);
      const uint32_t masked = MaskCrc(crc);
      std::memcpy(buffer_.data() + start + kHeaderBytes + payload, &masked, sizeof(masked));
      if (groups.bytes == nullptr) continue;
      const auto group = end - groups.ends;
      uint32_t& joined = groups.crcs[group];
      joined = groups.bytes[group] == 0 ? crc : Crc32c(data, payload, joined);
      groups.bytes[group] += static_cast<int64_t>(used_ - start);
    }
    return row;
  }

  const char* data() const { return buffer_.data(); }
  size_t size() const { return used_; }

 protected:
  // Appends one record with rows from `row` on; their group ends before `end`. Returns the first
  // row that isn't in the record.
  virtual int64_t Append(const ColumnView* views, int64_t row, int64_t end) = 0;

  // Returns where to write a payload of `size` bytes. Append() calls it once.
  char* BeginRecord(size_t size) {
    const size_t whole = kHeaderBytes + size + kFooterBytes;
    if (buffer_.size() - used_ < whole) buffer_.resize(std::max(2 * buffer_.size(), used_ + whole));
    char* out = buffer_.data() + used_;
    used_ += whole;
    WriteHeader(out, size);
    return out + kHeaderBytes;
  }

 private:
  std::vector<char> buffer_;
  size_t used_ = 0;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_RECORD_ENCODER_H_
