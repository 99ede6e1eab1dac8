// ShardRecords: the keys of a shard and their records, in memory and on disk.
//
//   KeyIndex   key -> row number                         (key_index.h)
//   Rows       row number -> record in memory            (rows.h)
//   DiskRows   row number -> record on disk, if the table has a disk tier   (disk_rows.h)
//
// Tiers
//   A row number shows in which tier the record is, and the index has one number for a key, so a
//   key is in one tier. A move between tiers copies a record's bytes and changes the number:
//   nothing else depends on where a record is, so a table gives the same numbers with any memory.
//   Passes that change records, or read many, first have the rows of their batch brought to memory
//   (BringUp); then they see only memory.
//
//   After a batch, Spill moves rows to disk until the rest is within its share of memory. A clock
//   decides which: a hand goes around the index, and a row that was used since it last passed is
//   skipped once. Rows that the current step uses go last. After a lookup, memory may exceed its
//   share by as many rows as the batch has keys, so that the update finds them; after the update it
//   may not.
//
// Every change of a record is noted for snapshots (undo_log.h), every removal in the journal
// (removal_journal.h).
//
// Thread safety: const methods may run concurrently; all others need exclusive access.

#ifndef GMETA_OPS_TABLE_HOST_RECORDS_H_
#define GMETA_OPS_TABLE_HOST_RECORDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <variant>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/common/partition.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/index/key_index.h"
#include "ops/table/core/removal_journal.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/statistics.h"
#include "ops/table/host/disk_rows.h"
#include "ops/table/host/key_pipeline.h"
#include "ops/table/host/record_columns.h"
#include "ops/table/host/row_recipe.h"
#include "ops/table/host/rows.h"
#include "ops/table/host/tiered_rows.h"
#include "ops/table/host/undo_log.h"

namespace gmeta {

class ShardRecords {
 public:
  // Of shard number `shard` of `shards`.
  ShardRecords(const RowRecipe* recipe, RowArenas* arenas, size_t shard, size_t shards)
      : recipe_(recipe),
        index_(GrowthPlace(shard, shards)),
        rows_(MakeRows(recipe->layout, recipe->half, recipe->half.Sweeps(shard, shards),
                       recipe->rounding, arenas,
                       recipe->disk ? DiskRows::kDisk : RowStore::kMostRows)),
        undo_(recipe->layout) {
    if (!recipe->disk) return;
    disk_.emplace(recipe->disk->folder, recipe->layout, recipe->disk->segment_bytes);
    most_bytes_ = recipe->disk->memory_bytes / shards;
  }

  KeyIndex& index() { return index_; }
  const KeyIndex& index() const { return index_; }
  UndoLog& undo() { return undo_; }
  RemovalJournal& journal() { return journal_; }

  // The rows in memory.
  Rows& memory() { return rows_; }
  // Calls visit(rows) with all rows, for reading.
  template <class Visit>
  auto VisitAll(const Visit& visit) const {
    return std::visit(
        [&](const auto& rows) {
          using MemoryRows = std::decay_t<decltype(rows)>;
          if (!disk_) return visit(rows);
          return visit(TieredRows<MemoryRows>(&rows, &*disk_, recipe_->layout));
        },
        rows_);
  }

  bool IsOnDisk(uint32_t row) const { return disk_.has_value() && DiskRows::IsOnDisk(row); }

  // Brings the rows of the items to memory, and notes their use for the clock.
  void BringUp(BatchItems items) {
    if (!disk_) return;
    std::vector<Moving> moving;
    const auto ask = [](const BatchItem&, uint32_t) {};
    Pipeline(index_, items, ask, [&](const BatchItem& item, uint64_t hash, uint32_t row) {
      if (DiskRows::IsOnDisk(row)) {
        moving.push_back({row, item.key, hash, 0});
      } else if (row != kNoRow) {
        NoteUse(row);
      }
    });
    if (moving.empty()) return;
    std::sort(moving.begin(), moving.end(),
              [](const Moving& a, const Moving& b) { return a.row < b.row; });
    moving.erase(std::unique(moving.begin(), moving.end(),
                             [](const Moving& a, const Moving& b) { return a.row == b.row; }),
                 moving.end());
    std::visit([&](auto& rows) { BringUp(&moving, &rows); }, rows_);
  }

  // Moves rows to disk until memory holds its share and `more` rows; those whose last step is `now`
  // go last.
  void Spill(uint32_t now, uint64_t more) {
    const uint64_t most = most_bytes_ + more * recipe_->layout.bytes();
    if (!disk_ || memory_bytes() <= most) return;
    const uint64_t enough = most - most_bytes_ / 32;
    const auto spill = [&](auto& rows) {
      // Two rounds pass each row with and without its note of use, and a third one takes all.
      const uint64_t round = index_.groups();
      for (uint64_t looks = 0; looks < 3 * round && memory_bytes() > enough; ++looks) {
        if (hand_ >= round) hand_ = 0;
        index_.ForEachOf(hand_, [&](int64_t key, uint32_t& row) {
          if (DiskRows::IsOnDisk(row)) return;
          if (looks < 2 * round && (rows.header(row)->last_step == now || ForgetUse(row))) return;
          const uint32_t from = row;
          row = disk_->Put(key, rows.record(from), rows.IsHalf(from),
                           [&](int64_t other, uint32_t to) {
                             *index_.FindValue(other, MurmurHash3(other)) = to;
                           });
          rows.Free(from);
          ++spilled_;
        });
        ++hand_;
      }
    };
    std::visit(spill, rows_);
  }

  // Writes one record of the columns, over that of its key if there is one, at a step of the table.
  void Import(const BatchItem& item, const ConstRecordColumns& from, uint32_t step) {
    std::visit([&](auto& rows) { Import(&rows, item, from, step); }, rows_);
  }

  // Returns the keys of the full rows that have cooled down by a step (half_rule.h).
  std::vector<BatchItem> ColdKeys(uint32_t step) const {
    struct FullRow {
      uint32_t row;
      int64_t key;
    };
    std::vector<FullRow> full;
    index_.ForEach([&](int64_t key, uint32_t row) {
      if (!HalfRule::IsHalf(row)) full.push_back({row, key});
    });
    constexpr size_t kAhead = 16;
    std::vector<BatchItem> cold;
    VisitAll([&](const auto& rows) {
      for (size_t i = 0; i < full.size(); ++i) {
        if (i + kAhead < full.size()) rows.PrefetchHeader(full[i + kAhead].row);
        if (rows.IsToBeHalf(*rows.header(full[i].row), step)) cold.push_back({full[i].key, 0});
      }
    });
    return cold;
  }

  // Makes full rows half.
  void Cool(const std::vector<BatchItem>& cold, uint32_t step) {
    constexpr size_t kPiece = 1024;  // rows on disk that memory has room for
    for (size_t first = 0; first < cold.size(); first += kPiece) {
      const size_t n = std::min(kPiece, cold.size() - first);
      BringUp({cold.data() + first, n});
      for (size_t i = first; i < first + n; ++i) {
        const uint64_t hash = MurmurHash3(cold[i].key);
        uint32_t* const row = index_.FindValue(cold[i].key, hash);
        if (undo_.is_open()) Note(cold[i].key, hash, *row);
        *row = std::visit([&](auto& rows) { return rows.Cool(*row); }, rows_);
      }
      Spill(step, 0);
    }
  }

  // Removes a key with its record. Returns whether the key had one. Every removal of a single key
  // goes through here, so that the journal and the snapshots see it.
  bool Remove(int64_t key, uint64_t hash) {
    const uint32_t row = index_.Find(key, hash);
    if (row == kNoRow) return false;
    if (undo_.is_open()) Note(key, hash, row);
    index_.Erase(key, hash);
    Free(row);
    journal_.Note(key);
    return true;
  }

  void Clear() {
    if (undo_.is_open()) {
      index_.ForEach([&](int64_t key, uint32_t row) { Note(key, MurmurHash3(key), row); });
    }
    index_.Clear();
    std::visit([](auto& rows) { rows.Clear(); }, rows_);
    if (disk_) disk_->Clear();
  }

  // The bytes that the rows count for against a bound in bytes.
  uint64_t charge() const {
    const uint64_t half = half_rows(), full = index_.size() - half;
    return index_.size() * Eviction::kIndexBytes + full * recipe_->layout.bytes() +
           half * HalfLayout(recipe_->layout).bytes();
  }

  void AddStatistics(TableStatistics* sum) const {
    sum->size += index_.size();
    sum->capacity += index_.capacity();
    sum->bytes += index_.bytes() + journal_.bytes() + undo_.bytes();
    sum->half_rows += half_rows();
    std::visit([&](const auto& rows) { sum->bytes += rows.directory_bytes(); }, rows_);
    if (!disk_) return;
    sum->bytes += disk_->memory_bytes() + used_.capacity() * sizeof(uint64_t);
    sum->disk_rows += disk_->size();
    sum->disk_bytes += disk_->file_bytes();
    sum->brought += brought_;
    sum->spilled += spilled_;
  }

 private:
  // A row on its way to memory.
  struct Moving {
    uint32_t row;
    int64_t key;
    uint64_t hash;
    uint32_t to;
  };

  template <class MemoryRows>
  void BringUp(std::vector<Moving>* moving, MemoryRows* rows) {
    std::vector<DiskRows::Wish> wishes;
    for (Moving& one : *moving) {
      one.to = rows->AllocateForm(HalfRule::IsHalf(one.row));
      wishes.push_back({one.row, rows->record(one.to)});
    }
    try {
      disk_->Read(wishes);
    } catch (...) {
      for (const Moving& one : *moving) rows->Free(one.to);
      throw;
    }
    for (const Moving& one : *moving) {
      *index_.FindValue(one.key, one.hash) = one.to;
      disk_->Free(one.row);
      NoteUse(one.to);
    }
    brought_ += moving->size();
  }

  template <class MemoryRows>
  void Import(MemoryRows* rows, const BatchItem& item, const ConstRecordColumns& from,
              uint32_t step) {
    const RowLayout& layout = recipe_->layout;
    const auto [key, position] = item;
    const uint64_t hash = MurmurHash3(key);
    const RowHeader header = {static_cast<uint32_t>(from.frequency[position]),
                              static_cast<uint32_t>(from.last_step[position])};
    uint32_t row = index_.Find(key, hash);
    if (undo_.is_open()) Note(key, hash, row);
    if (row == kNoRow) {
      row = rows->Allocate(header, step);
      index_.Insert(key, hash, row);
    } else if (IsOnDisk(row) || rows->IsHalf(row) != rows->IsToBeHalf(header, step)) {
      Free(row);
      row = rows->Allocate(header, step);
      *index_.FindValue(key, hash) = row;
    }
    *rows->header(row) = header;
    const float* own_weights = from.rows + position * layout.dim();
    const float* own_slots = from.slots + position * layout.slot_floats();
    rows->Write(row, [&](float* weights, float* slots) {
      std::copy_n(own_weights, layout.dim(), weights);
      std::copy_n(own_slots, layout.slot_floats(), slots);
    });
  }

  void Free(uint32_t row) {
    if (IsOnDisk(row)) return disk_->Free(row);
    std::visit([&](auto& rows) { rows.Free(row); }, rows_);
  }

  void Note(int64_t key, uint64_t hash, uint32_t row) {
    VisitAll([&](const auto& rows) { undo_.Note(rows, key, hash, row); });
  }

  uint64_t half_rows() const {
    const uint64_t here = std::visit([](const auto& rows) { return rows.half_rows(); }, rows_);
    return here + (disk_ ? disk_->half_rows() : 0);
  }

  uint64_t memory_bytes() const {
    return std::visit([&](const auto& rows) { return rows.bytes(index_.size() - disk_->size()); },
                      rows_);
  }

  // A bit for each row in memory: half rows have the odd ones.
  static uint64_t BitOf(uint32_t row) {
    return uint64_t{row & ~HalfRule::kHalf} * 2 + (HalfRule::IsHalf(row) ? 1 : 0);
  }
  void NoteUse(uint32_t row) {
    const uint64_t bit = BitOf(row);
    if (bit / 64 >= used_.size()) used_.resize(bit / 64 * 5 / 4 + 1);
    used_[bit / 64] |= uint64_t{1} << bit % 64;
  }
  bool ForgetUse(uint32_t row) {
    const uint64_t bit = BitOf(row), mask = uint64_t{1} << bit % 64;
    if (bit / 64 >= used_.size() || (used_[bit / 64] & mask) == 0) return false;
    used_[bit / 64] &= ~mask;
    return true;
  }

  const RowRecipe* const recipe_;
  KeyIndex index_;
  Rows rows_;
  std::optional<DiskRows> disk_;
  UndoLog undo_;
  RemovalJournal journal_;
  uint64_t most_bytes_ = 0;     // of rows in memory
  uint64_t hand_ = 0;           // the group of the index that the clock looks at next
  std::vector<uint64_t> used_;  // see BitOf
  uint64_t brought_ = 0, spilled_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_RECORDS_H_
