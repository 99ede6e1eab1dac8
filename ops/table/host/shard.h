// Shard: one of a table's sub-tables, with a key index and a row store under one lock, and the
// passes that a batch makes over it.
//
// A pass has four stages (key_pipeline.h). A row number found in stage 2 is valid through stage 4:
// rows never move, and a pass erases nothing. Passes over records are compiled for each form of
// rows and each admission policy, and chosen once per batch. A lookup that inserts first evicts
// (eviction.h), and decides in stage 4 whether to admit a missing key (admission.h). Which rows a
// lookup copies is up to its sink (row_sinks.h), and that a row has changed shows in its stamp
// (stamp.h).

#ifndef GMETA_OPS_TABLE_HOST_SHARD_H_
#define GMETA_OPS_TABLE_HOST_SHARD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <variant>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/common/partition.h"
#include "ops/common/prefetch.h"
#include "ops/table/core/admission.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/key_index.h"
#include "ops/table/core/logical_shards.h"
#include "ops/table/core/removal_journal.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/stamp.h"
#include "ops/table/core/statistics.h"
#include "ops/table/host/distinct_gradients.h"
#include "ops/table/host/key_pipeline.h"
#include "ops/table/host/record_columns.h"
#include "ops/table/host/row_ranking.h"
#include "ops/table/host/row_recipe.h"
#include "ops/table/host/row_store.h"
#include "ops/table/host/rows.h"
#include "ops/table/host/undo_log.h"

namespace gmeta {

class alignas(128) Shard {
 public:
  // Number `shard` of `shards`.
  Shard(const RowRecipe* recipe, RowArenas* arenas, size_t shard, size_t shards)
      : recipe_(recipe),
        index_(GrowthLoad(shard, shards)),
        rows_(MakeRows(recipe->layout, recipe->half_below, arenas)),
        undo_(recipe->layout),
        admission_(BeginAdmission(recipe->admission, shards)),
        schedule_(recipe->eviction ? EvictionSchedule(*recipe->eviction, shard, shards)
                                   : EvictionSchedule()) {}

  // Reads rows to a sink (row_sinks.h). A missing key reads its initial row. Nothing changes, not
  // even the statistics.
  template <class Sink>
  void Peek(BatchItems items, const Sink& sink) {
    Read(items, sink);
  }

  // The same, and counts in the statistics. Returns how many rows the sink wanted.
  template <class Sink>
  uint64_t Lookup(BatchItems items, const Sink& sink) {
    const ReadCounts counts = Read(items, sink);
    counters_.Add(&ShardCounters::hits, counts.hits);
    counters_.Add(&ShardCounters::misses, items.size - counts.hits);
    return counts.wanted;
  }

  // Reads rows to a sink and records their use. First evicts rows if the shard is above a high
  // mark. Inserts a row for each missing key that is admitted. Returns how many rows the sink
  // wanted.
  template <class Sink>
  uint64_t LookupOrInsert(BatchItems items, uint32_t step, const Sink& sink) {
    ReadCounts counts;
    uint64_t evictions = 0;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      if (recipe_->eviction) evictions = MakeRoom(step, false);
      std::visit([&](auto& admission,
                     auto& rows) { counts = LookupOrInsert(items, step, &admission, &rows, sink); },
                 admission_, rows_);
      index_.Drain(DrainShare(items.size));
    }
    counters_.Add(&ShardCounters::hits, items.size - counts.inserts - counts.rejects);
    counters_.Add(&ShardCounters::misses, counts.inserts + counts.rejects);
    counters_.Add(&ShardCounters::inserts, counts.inserts);
    counters_.Add(&ShardCounters::rejects, counts.rejects);
    counters_.Add(&ShardCounters::evictions, evictions);
    return counts.wanted;
  }

  // Runs one optimizer step for each distinct key, with the sum of its gradients in the order of
  // the batch. Skips absent keys.
  template <class Step>
  void Update(BatchItems items, const float* gradients, uint32_t step, const Step& optimizer) {
    const size_t dim = recipe_->layout.dim();
    const DistinctGradients distinct(items, gradients, dim);
    uint64_t updates = 0;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      std::visit(
          [&](auto& rows) {
            const auto ask = [&](const BatchItem& item, uint32_t row) {
              if (row == kNoRow) return;
              rows.template PrefetchRecord<Intent::kWrite>(row);
              PrefetchBytes<Intent::kRead>(distinct[item], sizeof(float) * dim);
            };
            const auto use = [&](const BatchItem& item, uint64_t hash, uint32_t row) {
              if (row == kNoRow) return;
              ++updates;
              undo_.Note(rows, item.key, hash, row);
              const uint32_t before = std::exchange(rows.header(row)->last_step, step);
              epoch_.NoteStep(before, step, true);
              rows.Change(row, [&](float* weights, float* slots) {
                optimizer(step - before, dim, distinct[item], weights, slots);
              });
            };
            Pipeline(index_, distinct.items(), ask, use);
          },
          rows_);
      index_.Drain(DrainShare(items.size));
    }
    counters_.Add(&ShardCounters::updates, updates);
    counters_.Add(&ShardCounters::ignored, distinct.items().size - updates);
  }

  uint64_t Remove(BatchItems items) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    uint64_t removes = 0;
    for (size_t i = 0; i < items.size; ++i) {
      removes += RemoveRow(items.data[i].key, MurmurHash3(items.data[i].key));
    }
    if (removes > 0) epoch_.End();
    counters_.Add(&ShardCounters::removes, removes);
    return removes;
  }

  void Contains(BatchItems items, bool* out) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto ask = [](const BatchItem&, uint32_t) {};
    const auto use = [&](const BatchItem& item, uint64_t, uint32_t row) {
      out[item.position] = row != kNoRow;
    };
    Pipeline(index_, items, ask, use);
  }

  // Writes all records to places `start`, start + 1, ... of the columns.
  void Export(uint64_t start, const RecordColumns& to) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    std::visit(
        [&](const auto& rows) {
          index_.ForEach([&](int64_t key, uint32_t row) {
            to.Write(recipe_->layout, rows, key, row, start++);
          });
        },
        rows_);
  }

  // Selects from a range of logical shards the rows whose last step is `min_last_step` or later,
  // the removed keys, which the journal cuts, and the keys that wait for admission. Adds the number
  // of all rows of each logical shard to live[logical shard - range.first].
  ShardSelection Select(LogicalRange range, uint32_t min_last_step, int64_t* live) {
    ShardSelection selection;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    std::visit(
        [&](const auto& rows) {
          index_.ForEach([&](int64_t key, uint32_t row) {
            const uint32_t logical = LogicalShard(MurmurHash3(key));
            if (!range.contains(logical)) return;
            ++live[logical - range.first];
            if (min_last_step > 0 && rows.header(row)->last_step < min_last_step) return;
            selection.items.push_back({logical, row, key});
          });
        },
        rows_);
    selection.journal_whole = journal_.whole();
    journal_.Cut(
        [&](int64_t key) { return range.contains(LogicalShard(MurmurHash3(key))); },
        [&](int64_t key) { selection.removed.push_back({LogicalShard(MurmurHash3(key)), key}); });
    const auto wait = [&](int64_t key, uint32_t count) {
      const uint32_t logical = LogicalShard(MurmurHash3(key));
      if (range.contains(logical)) selection.waiting.push_back({logical, count, key});
    };
    std::visit([&](const auto& admission) { admission.ForEachCounter(wait); }, admission_);
    selection.Sort();
    return selection;
  }

  // Writes records, selected since the last change, to places `start`, start + 1, ... of columns.
  void ExportSelected(const ShardSelection& selection, uint64_t start, const RecordColumns& to) {
    constexpr size_t kAhead = 8;
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto& items = selection.items;
    std::visit(
        [&](const auto& rows) {
          for (size_t i = 0; i < items.size(); ++i) {
            if (i + kAhead < items.size()) {
              rows.template PrefetchRecord<Intent::kRead>(items[i + kAhead].row);
            }
            to.Write(recipe_->layout, rows, items[i].key, items[i].row, start + i);
          }
        },
        rows_);
  }

  // See removal_journal.h.
  void StartJournal(size_t limit) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.Start(limit);
  }
  void DropCutRemovals() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.DropCut();
  }
  bool journal_whole() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return journal_.whole();
  }

  // Writes the records at the items' positions in the columns to the shard, and overwrites the
  // records of keys that it already has.
  void Import(BatchItems items, const ConstRecordColumns& from) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.Break();
    epoch_.End();
    index_.Reserve(index_.size() + items.size);
    std::visit(
        [&](auto& rows) {
          for (size_t i = 0; i < items.size; ++i) ImportRow(&rows, items.data[i], from);
        },
        rows_);
  }

  // Snapshots, see undo_log.h. They are numbered from the oldest, which is 0.
  void TakeSnapshot() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    undo_.Begin();
  }
  void DropSnapshot(size_t number) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    undo_.Drop(number);
  }
  void RestoreSnapshot(size_t number) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.Break();
    epoch_.End();
    std::visit(
        [&](auto& rows) {
          undo_.Undo(number, [&](const UndoLog::Record& record) {
            if (record.values == nullptr) {
              RemoveRow(record.key, MurmurHash3(record.key));
              return;
            }
            const int64_t frequency = record.header.frequency, last_step = record.header.last_step;
            const float* slots = record.values + recipe_->layout.dim();
            ImportRow(&rows, {record.key, 0},
                      {&record.key, record.values, slots, &frequency, &last_step});
          });
        },
        rows_);
  }

  // Makes room in the index for `keys` keys in total.
  void ReserveKeys(uint64_t keys) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    index_.Reserve(keys);
  }

  void Clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.Break();
    epoch_.End();
    if (undo_.is_open()) {
      std::visit(
          [&](const auto& rows) {
            index_.ForEach(
                [&](int64_t key, uint32_t row) { undo_.Note(rows, key, MurmurHash3(key), row); });
          },
          rows_);
    }
    index_.Clear();
    std::visit([](auto& rows) { rows.Clear(); }, rows_);
    std::visit([](auto& admission) { admission.Clear(); }, admission_);
  }

  // Whether the update of this step has to end with Evict.
  bool IsSweepDue(uint64_t step) const { return schedule_.IsSweepDue(step); }

  // Evicts expired rows and, if the shard is above its bound, further rows. Returns how many rows
  // were evicted.
  uint64_t Evict(uint32_t step) {
    uint64_t evictions;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      evictions = recipe_->eviction ? MakeRoom(step, true) : 0;
    }
    counters_.Add(&ShardCounters::evictions, evictions);
    return evictions;
  }

  // The state of admission. Only for callers with exclusive access to the table.
  AdmissionState& admission() { return admission_; }

  uint64_t size() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return index_.size();
  }

  void AddStatistics(TableStatistics* sum) {
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      sum->size += index_.size();
      sum->capacity += index_.capacity();
      sum->bytes += index_.bytes() + journal_.bytes() + undo_.bytes();
      std::visit(
          [&](const auto& rows) {
            sum->bytes += rows.directory_bytes();
            sum->half_rows += rows.half_rows();
          },
          rows_);
      sum->bytes += std::visit([](const auto& admission) { return admission.bytes(); }, admission_);
    }
    counters_.AddTo(sum);
  }

 private:
  // What a pass has counted; `wanted`: rows that the sink wanted.
  struct ReadCounts {
    uint64_t wanted = 0, hits = 0, inserts = 0, rejects = 0;
  };

  template <class RowsOfShard>
  int64_t StampOf(const RowsOfShard& rows, uint32_t row) const {
    return row == kNoRow ? MissingStamp(epoch_.number())
                         : RowStamp(epoch_.number(), rows.header(row)->last_step);
  }

  template <class Sink>
  ReadCounts Read(BatchItems items, const Sink& sink) {
    ReadCounts counts;
    std::shared_lock<std::shared_mutex> lock(mutex_);
    std::visit(
        [&](const auto& rows) {
          const auto use = [&](const BatchItem& item, uint64_t, uint32_t row) {
            counts.hits += row != kNoRow;
            if (!sink.Wants(item.position, StampOf(rows, row))) return;
            ++counts.wanted;
            float* to = sink.place(item.position);
            row == kNoRow ? recipe_->ReadInitial(rows, item.key, to) : rows.CopyWeights(row, to);
          };
          const auto ask = [&](const BatchItem& item, uint32_t row) {
            sink.Prefetch(rows, item.position, row);
          };
          Pipeline(index_, items, ask, use);
        },
        rows_);
    return counts;
  }

  template <class AdmissionOfShard, class RowsOfShard, class Sink>
  ReadCounts LookupOrInsert(BatchItems items, uint32_t step, AdmissionOfShard* admission,
                            RowsOfShard* rows, const Sink& sink) {
    ReadCounts counts;
    const auto use = [&](const BatchItem& item, uint64_t hash, uint32_t row) {
      // Since stage 2, another occurrence of the key in the batch may have inserted an absent key
      // or promoted a half row.
      if (row == kNoRow || rows->IsHalf(row)) row = index_.Find(item.key, hash);
      const bool wanted = sink.Wants(item.position, StampOf(*rows, row));
      counts.wanted += wanted;
      if (row == kNoRow) {
        if (!admission->Admit(item.key, step)) {
          if (wanted) recipe_->ReadInitial(*rows, item.key, sink.place(item.position));
          ++counts.rejects;
          return;
        }
        undo_.Note(*rows, item.key, hash, kNoRow);
        row = recipe_->MakeInitial(rows, item.key);
        index_.Insert(item.key, hash, row);
        ++counts.inserts;
      } else {
        undo_.Note(*rows, item.key, hash, row);
      }
      const uint32_t before = rows->header(row)->last_step;
      const uint32_t touched = rows->Touch(row, step, recipe_->prior.empty());
      if (touched != row) *index_.FindValue(item.key, hash) = touched;
      epoch_.NoteStep(before, rows->header(touched)->last_step, false);
      if (wanted) rows->CopyWeights(touched, sink.place(item.position));
    };
    const auto ask = [&](const BatchItem& item, uint32_t row) {
      if (row == kNoRow) {
        admission->Prefetch(item.key);
      } else {
        rows->PrefetchHeader(row);
      }
      sink.Prefetch(*rows, item.position, row);
    };
    Pipeline(index_, items, ask, use);
    return counts;
  }

  // Evicts the expired rows if `sweep` is true. If the shard is then above a high mark, evicts the
  // rows of the lowest rank until it is down to the low marks. Returns how many rows were evicted.
  uint64_t MakeRoom(uint32_t now, bool sweep) {
    const auto is_full = [&] {
      return index_.size() > schedule_.rows.high || charge() > schedule_.bytes.high;
    };
    if (!sweep && !is_full()) return 0;
    const uint64_t before = index_.size();
    std::vector<RankedRow> ranked = std::visit(
        [&](const auto& policy, const auto& rows) {
          return RankRows(policy, index_, rows, recipe_->layout.dim(), [&](const auto& row) {
            return sweep && policy.Expired(row, now) && RemoveRow(row.key, MurmurHash3(row.key));
          });
        },
        recipe_->eviction->policy, rows_);
    if (is_full()) {
      const uint64_t most = recipe_->layout.bytes() + Eviction::kIndexBytes;  // charge of one row
      const auto above = [&] {
        return std::max(Excess(index_.size(), schedule_.rows.low, 1),
                        Excess(charge(), schedule_.bytes.low, most));
      };
      RemoveLowest(std::move(ranked), above,
                   [&](const RankedRow& row) { RemoveRow(row.key, MurmurHash3(row.key)); });
    }
    if (index_.size() < before) epoch_.End();
    return before - index_.size();
  }

  // The bytes that the rows count for against a bound in bytes.
  uint64_t charge() const {
    const uint64_t size = index_.size();
    return size * Eviction::kIndexBytes +
           std::visit([&](const auto& rows) { return rows.bytes(size); }, rows_);
  }

  template <class RowsOfShard>
  void ImportRow(RowsOfShard* rows, const BatchItem& item, const ConstRecordColumns& from) {
    const RowLayout& layout = recipe_->layout;
    const auto [key, position] = item;
    const uint64_t hash = MurmurHash3(key);
    const RowHeader header = {static_cast<uint32_t>(from.frequency[position]),
                              static_cast<uint32_t>(from.last_step[position])};
    uint32_t row = index_.Find(key, hash);
    undo_.Note(*rows, key, hash, row);
    if (row == kNoRow) {
      row = rows->Allocate(header.frequency);
      index_.Insert(key, hash, row);
    } else if (!rows->Fits(row, header.frequency)) {
      rows->Free(row);
      row = rows->Allocate(header.frequency);
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

  // Removes a key with its record. Returns whether the key had one. Every removal of a single key
  // goes through here, so that the journal and the snapshots see it.
  bool RemoveRow(int64_t key, uint64_t hash) {
    const uint32_t row = index_.Erase(key, hash);
    if (row == kNoRow) return false;
    std::visit(
        [&](auto& rows) {
          undo_.Note(rows, key, hash, row);
          rows.Free(row);
        },
        rows_);
    journal_.Note(key);
    return true;
  }

  // How many groups a batch drains. Batches that insert nothing also advance a drain, so that later
  // batches needn't probe two tables.
  static uint64_t DrainShare(size_t items) { return items / 4 + 1; }

  std::shared_mutex mutex_;
  const RowRecipe* const recipe_;
  KeyIndex index_;
  Rows rows_;
  UndoLog undo_;
  RemovalJournal journal_;
  AdmissionState admission_;
  const EvictionSchedule schedule_;
  Epoch epoch_;
  ShardCounters counters_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_SHARD_H_
