// RecordLog: records of one size on a drive, for one shard of a table.
//
// Layout
//   The file is an array of segments of about `segment_bytes`, each of whole blocks. A segment is
//   an array of slots:
//     offset 0   int64   key
//     offset 8   uint32  CRC-32C of the place, the key and the record
//     offset 12  record  (ops/table/core/row_record.h, or any bytes)
//   A place is a segment's number times the slots of a segment, plus the slot's number. The owner
//   keeps the places; the log knows only which of them are live (a bit each).
//
// Writing
//   Records go into the open segment, which is in memory. When it is full, one write of whole
//   blocks puts it on the drive, and another one opens. So the drive sees large consecutive writes,
//   whatever the keys are. A record that is freed leaves a dead slot; a segment without live
//   records is free, and is opened again before the file grows.
//
// Collection
//   If more slots of the full segments are dead than live when a segment opens, the live records of
//   the segment that has the fewest move into the new one, and their segment is free. It has at
//   most half of its records live, so
//     - at least half of each written segment is new records: each record is written at most twice
//       on average (write amplification <= 2), and
//     - the file has at most twice the live records, plus two segments.
//
// Reading
//   A batch's places are sorted, blocks that touch are read together, and all reads are in flight
//   at once (io_ring.h). A record that isn't what was written there is an error.
//
// Failure
//   A write that fails leaves the log unchanged, with the segment in memory; the next Append tries
//   again. The file is scratch: a restart begins from a checkpoint.
//
// Thread safety: const methods may run concurrently; all others need exclusive access.

#ifndef GMETA_OPS_TABLE_DISK_RECORD_LOG_H_
#define GMETA_OPS_TABLE_DISK_RECORD_LOG_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/common/crc32c.h"
#include "ops/table/disk/block_file.h"

namespace gmeta::disk {

class RecordLog {
 public:
  // A record to read: its place, and where to put it.
  struct Wish {
    uint32_t place;
    char* to;
  };

  // The file is made in `folder` when the first segment is written. Places are below `most_places`.
  RecordLog(std::string folder, size_t record_bytes, uint64_t most_places, size_t segment_bytes)
      : folder_(std::move(folder)),
        record_bytes_(record_bytes),
        slot_bytes_(kHead + record_bytes),
        slots_(std::max<size_t>(1, segment_bytes / slot_bytes_)),
        segment_bytes_(BlocksUp(slots_ * slot_bytes_)),
        most_segments_(most_places / slots_),
        next_(slots_) {}

  uint64_t size() const { return size_; }
  // Bytes of the file, and of the records that were written to it, including moved ones.
  uint64_t file_bytes() const { return file_ ? live_.size() * segment_bytes_ : 0; }
  uint64_t written_records() const { return written_; }
  size_t memory_bytes() const {
    return open_memory_.bytes() + live_.capacity() * sizeof(uint32_t) +
           bits_.capacity() * sizeof(uint64_t) + free_.capacity() * sizeof(uint32_t);
  }

  // Adds a record. Returns its place. If records move, calls moved(key, from, to) for each.
  template <class Moved>
  uint32_t Append(int64_t key, const char* record, const Moved& moved) {
    if (next_ == slots_) Roll(moved);
    const uint32_t place = open_ * static_cast<uint32_t>(slots_) + static_cast<uint32_t>(next_);
    char* const slot = open_memory_.data() + next_ * slot_bytes_;
    std::memcpy(slot, &key, sizeof key);
    std::memcpy(slot + kHead, record, record_bytes_);
    Sign(place, slot);
    ++next_;
    Revive(place);
    return place;
  }

  // Forgets a record, which must be live.
  void Free(uint32_t place) {
    const uint32_t segment = SegmentOf(place);
    bits_[place / 64] &= ~(uint64_t{1} << place % 64);
    --size_;
    if (--live_[segment] == 0 && segment != open_) free_.push_back(segment);
  }

  // Reads records; sorts the wishes by place.
  void Read(std::vector<Wish>* wishes) const {
    std::sort(wishes->begin(), wishes->end(),
              [](const Wish& a, const Wish& b) { return a.place < b.place; });
    BlockMemory staging;
    std::vector<ReadPiece> pieces;
    for (size_t begin = 0; begin < wishes->size();) {
      pieces.clear();
      size_t end = begin, bytes = 0;  // of this round, whose pieces share the staging memory
      for (; end < wishes->size() && bytes < kStaging; ++end) {
        const uint32_t place = (*wishes)[end].place;
        if (SegmentOf(place) == open_) continue;
        const uint64_t first = BlocksDown(Offset(place));
        const uint64_t last = BlocksUp(Offset(place) + slot_bytes_);
        if (!pieces.empty() && first <= pieces.back().offset + pieces.back().bytes &&
            pieces.back().bytes < kLongest) {
          const uint64_t before = pieces.back().offset + pieces.back().bytes;
          if (last > before) bytes += last - before, pieces.back().bytes += last - before;
        } else {
          pieces.push_back({first, static_cast<size_t>(last - first), nullptr});
          bytes += last - first;
        }
      }
      staging.Reserve(bytes);
      char* at = staging.data();
      for (ReadPiece& piece : pieces) at = (piece.to = at) + piece.bytes;
      if (!pieces.empty()) file_->Read(pieces);
      auto piece = pieces.begin();
      for (; begin < end; ++begin) {
        const Wish& wish = (*wishes)[begin];
        if (SegmentOf(wish.place) == open_) {
          const char* slot = open_memory_.data() + wish.place % slots_ * slot_bytes_;
          std::memcpy(wish.to, slot + kHead, record_bytes_);
          continue;
        }
        const uint64_t offset = Offset(wish.place);
        while (piece->offset + piece->bytes < offset + slot_bytes_) ++piece;
        Take(piece->to + (offset - piece->offset), wish.place, wish.to);
      }
    }
  }

  // Forgets all records.
  void Clear() {
    live_.clear();
    bits_.clear();
    free_.clear();
    size_ = 0;
    open_ = kNone;
    next_ = slots_;
  }

 private:
  static constexpr size_t kHead = sizeof(int64_t) + sizeof(uint32_t);
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr size_t kStaging = size_t{4} << 20;
  static constexpr size_t kLongest = size_t{1} << 20;  // of a piece

  uint32_t SegmentOf(uint32_t place) const { return place / static_cast<uint32_t>(slots_); }
  uint64_t Offset(uint32_t place) const {
    return SegmentOf(place) * uint64_t{segment_bytes_} + place % slots_ * slot_bytes_;
  }
  bool IsLive(uint32_t place) const { return (bits_[place / 64] >> place % 64 & 1) != 0; }

  void Revive(uint32_t place) {
    bits_[place / 64] |= uint64_t{1} << place % 64;
    ++live_[SegmentOf(place)];
    ++size_;
  }

  uint32_t Crc(uint32_t place, const char* slot) const {
    const uint32_t of_place = Crc32c(reinterpret_cast<const char*>(&place), sizeof place);
    return Crc32c(slot + kHead, record_bytes_, Crc32c(slot, sizeof(int64_t), of_place));
  }
  void Sign(uint32_t place, char* slot) const {
    const uint32_t crc = Crc(place, slot);
    std::memcpy(slot + sizeof(int64_t), &crc, sizeof crc);
  }

  // Checks a slot and copies its record.
  void Take(const char* slot, uint32_t place, char* to) const {
    uint32_t crc;
    std::memcpy(&crc, slot + sizeof(int64_t), sizeof crc);
    if (crc != Crc(place, slot)) file_->Damaged(Offset(place));
    std::memcpy(to, slot + kHead, record_bytes_);
  }

  // Writes the open segment, if there is one, and opens another. Collects if due.
  template <class Moved>
  void Roll(const Moved& moved) {
    if (open_ != kNone && live_[open_] > 0) {
      if (!file_) file_.emplace(folder_);
      file_->Write(open_ * uint64_t{segment_bytes_}, open_memory_.data(), segment_bytes_);
      written_ += slots_;
    } else if (open_ != kNone) {
      free_.push_back(open_);
    }
    open_memory_.Reserve(segment_bytes_);
    if (free_.empty()) {
      if (live_.size() == most_segments_) {
        throw std::length_error("a shard has no numbers for more rows on disk");
      }
      live_.push_back(0);
      bits_.resize((live_.size() * slots_ + 63) / 64);
      free_.push_back(static_cast<uint32_t>(live_.size() - 1));
    }
    open_ = free_.back();
    free_.pop_back();
    next_ = 0;
    const uint64_t full = live_.size() - free_.size() - 1;  // segments on the drive in use
    if (full * slots_ > 2 * size_) Collect(moved);
  }

  // Moves the live records of the full segment with the fewest to the open one.
  template <class Moved>
  void Collect(const Moved& moved) {
    uint32_t victim = kNone;
    for (uint32_t i = 0; i < live_.size(); ++i) {
      if (i == open_ || live_[i] == 0) continue;
      if (victim == kNone || live_[i] < live_[victim]) victim = i;
    }
    if (victim == kNone) return;
    BlockMemory segment(segment_bytes_);
    const uint64_t start = victim * uint64_t{segment_bytes_};
    file_->Read({{start, segment_bytes_, segment.data()}});
    const uint32_t first = victim * static_cast<uint32_t>(slots_);
    for (uint32_t i = 0; i < slots_; ++i) {
      if (!IsLive(first + i)) continue;
      const char* const slot = segment.data() + i * slot_bytes_;
      int64_t key;
      std::memcpy(&key, slot, sizeof key);
      char* const to = open_memory_.data() + next_ * slot_bytes_;
      Take(slot, first + i, to + kHead);
      std::memcpy(to, slot, kHead);
      const uint32_t place = open_ * static_cast<uint32_t>(slots_) + static_cast<uint32_t>(next_);
      Sign(place, to);
      ++next_;
      Revive(place);
      Free(first + i);
      moved(key, first + i, place);
    }
  }

  const std::string folder_;
  const size_t record_bytes_, slot_bytes_, slots_, segment_bytes_;
  const uint64_t most_segments_;
  std::optional<BlockFile> file_;
  BlockMemory open_memory_;
  uint32_t open_ = kNone;
  size_t next_;                 // the first unused slot of the open segment
  std::vector<uint32_t> live_;  // live records of each segment
  std::vector<uint64_t> bits_;  // whether a place is live
  std::vector<uint32_t> free_;  // segments without records
  uint64_t size_ = 0;
  uint64_t written_ = 0;
};

}  // namespace gmeta::disk

#endif  // GMETA_OPS_TABLE_DISK_RECORD_LOG_H_
