// DiskRows: the records of a shard that are on a drive, in the logs of record_log.h, one for each
// form of rows.
//
// Such a row has a number, like a row in memory, with the flag kDisk: the flag, HalfRule's flag for
// half rows, and the place in the log of its form. The header of each row is in memory too, so that
// eviction, selection and stamps (stamp.h) need no read.
//
// Thread safety: const methods may run concurrently; all others need exclusive access.

#ifndef GMETA_OPS_TABLE_HOST_DISK_ROWS_H_
#define GMETA_OPS_TABLE_HOST_DISK_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ops/table/core/half_rule.h"
#include "ops/table/core/index/key_index.h"
#include "ops/table/core/row_record.h"
#include "ops/table/disk/record_log.h"

namespace gmeta {

class DiskRows {
 public:
  static constexpr uint32_t kDisk = uint32_t{1} << 30;

  static bool IsOnDisk(uint32_t row) { return row != kNoRow && (row & kDisk) != 0; }

  // A row to read: its number, and where its record goes.
  struct Wish {
    uint32_t row;
    char* to;
  };

  DiskRows(const std::string& folder, const RowLayout& layout, size_t segment_bytes)
      : full_(folder, layout.bytes(), segment_bytes),
        half_(folder, HalfLayout(layout).bytes(), segment_bytes) {}

  uint64_t size() const { return full_.log.size() + half_.log.size(); }
  uint64_t half_rows() const { return half_.log.size(); }
  uint64_t file_bytes() const { return full_.log.file_bytes() + half_.log.file_bytes(); }
  size_t memory_bytes() const { return full_.memory_bytes() + half_.memory_bytes(); }

  const RowHeader* header(uint32_t row) const { return &FormOf(row).headers[row & ~kFlags]; }

  // Writes a record. Returns its number. Calls moved(key, number) for each row that gets another.
  template <class Moved>
  uint32_t Put(int64_t key, const char* record, bool half, const Moved& moved) {
    Form& form = half ? half_ : full_;
    const uint32_t flags = kDisk | (half ? HalfRule::kHalf : 0);
    const uint32_t place =
        form.log.Append(key, record, [&](int64_t other, uint32_t from, uint32_t to) {
          const RowHeader header = form.headers[from];
          form.SetHeader(to, header);
          moved(other, flags | to);
        });
    RowHeader header;
    std::memcpy(&header, record, sizeof header);
    form.SetHeader(place, header);
    return flags | place;
  }

  void Free(uint32_t row) { FormOf(row).log.Free(row & ~kFlags); }

  void Read(const std::vector<Wish>& wishes) const {
    std::vector<disk::RecordLog::Wish> of_form;
    for (const bool half : {false, true}) {
      of_form.clear();
      for (const Wish& wish : wishes) {
        if (HalfRule::IsHalf(wish.row) == half) of_form.push_back({wish.row & ~kFlags, wish.to});
      }
      (half ? half_ : full_).log.Read(&of_form);
    }
  }

  void Clear() {
    full_.log.Clear();
    half_.log.Clear();
  }

 private:
  static constexpr uint32_t kFlags = kDisk | HalfRule::kHalf;

  struct Form {
    Form(const std::string& folder, size_t record_bytes, size_t segment_bytes)
        : log(folder, record_bytes, kDisk, segment_bytes) {}

    void SetHeader(uint32_t place, RowHeader header) {
      if (place >= headers.size()) headers.resize(place + 1);
      headers[place] = header;
    }
    size_t memory_bytes() const {
      return log.memory_bytes() + headers.capacity() * sizeof(RowHeader);
    }

    disk::RecordLog log;
    std::vector<RowHeader> headers;  // by place
  };

  const Form& FormOf(uint32_t row) const { return HalfRule::IsHalf(row) ? half_ : full_; }
  Form& FormOf(uint32_t row) { return HalfRule::IsHalf(row) ? half_ : full_; }

  Form full_, half_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_DISK_ROWS_H_
