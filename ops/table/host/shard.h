// Shard: one of a table's sub-tables: records (records.h) under a lock, and the passes that a batch
// makes over them.
//
// A pass has four stages (key_pipeline.h). A row number found in stage 2 is valid through stage 4:
// rows never move, and a pass erases nothing. Passes over records are compiled for each form of
// rows and each admission policy, and chosen once per batch. A lookup that inserts first evicts
// (eviction.h), and decides in stage 4 whether to admit a missing key (admission.h). A lookup's
// sink decides which rows it copies (row_sinks.h), and a row's stamp shows that it has changed
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
#include "ops/table/core/index/key_index.h"
#include "ops/table/core/logical_shards.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/stamp.h"
#include "ops/table/core/statistics.h"
#include "ops/table/core/sweep_schedule.h"
#include "ops/table/host/distinct_gradients.h"
#include "ops/table/host/key_pipeline.h"
#include "ops/table/host/record_columns.h"
#include "ops/table/host/records.h"
#include "ops/table/host/row_ranking.h"
#include "ops/table/host/row_recipe.h"
#include "ops/table/host/undo_log.h"

namespace gmeta {

class alignas(128) Shard {
 public:
  // Number `shard` of `shards`.
  Shard(const RowRecipe* recipe, RowArenas* arenas, size_t shard, size_t shards)
      : recipe_(recipe),
        records_(recipe, arenas, shard, shards),
        admission_(BeginAdmission(recipe->admission, shards)),
        schedule_(recipe->eviction ? EvictionSchedule(*recipe->eviction, shard, shards)
                                   : EvictionSchedule()),
        cooling_(recipe->half.Sweeps(shard, shards)) {}

  // Reads rows to a sink (row_sinks.h). A missing key reads its initial row. Nothing changes, not
  // even the statistics, but rows on disk come to memory: a later batch will use them.
  template <class Sink>
  void Peek(BatchItems items, const Sink& sink) {
    if (recipe_->disk) Prefetch(items);
    Read(items, sink);
  }

  // Brings rows on disk to memory.
  void Prefetch(BatchItems items) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.BringUp(items);
    records_.Spill(kNoStep, items.size);
  }

  // The same, and counts in the statistics; rows stay where they are. Returns how many rows the
  // sink wanted.
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
      records_.BringUp(items);
      std::visit([&](auto& admission,
                     auto& rows) { counts = LookupOrInsert(items, step, &admission, &rows, sink); },
                 admission_, records_.memory());
      records_.index().Drain(DrainShare(items.size));
      records_.Spill(step, items.size);
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
      records_.BringUp(distinct.items());
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
              records_.undo().Note(rows, item.key, hash, row);
              const uint32_t before = std::exchange(rows.header(row)->last_step, step);
              epoch_.NoteStep(before, step, true);
              rows.Change(row, item.key, step, [&](float* weights, float* slots) {
                optimizer(step - before, dim, distinct[item], weights, slots);
              });
              const uint32_t fitting = rows.Refit(row, step);
              if (fitting != row) *records_.index().FindValue(item.key, hash) = fitting;
            };
            Pipeline(records_.index(), distinct.items(), ask, use);
          },
          records_.memory());
      records_.index().Drain(DrainShare(items.size));
      records_.Spill(step, 0);
    }
    counters_.Add(&ShardCounters::updates, updates);
    counters_.Add(&ShardCounters::ignored, distinct.items().size - updates);
  }

  uint64_t Remove(BatchItems items) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    uint64_t removes = 0;
    for (size_t i = 0; i < items.size; ++i) {
      removes += records_.Remove(items.data[i].key, MurmurHash3(items.data[i].key));
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
    Pipeline(records_.index(), items, ask, use);
  }

  // Writes all records to places `start`, start + 1, ... of the columns.
  void Export(uint64_t start, const RecordColumns& to) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    ShardSelection all;
    records_.index().ForEach(
        [&](int64_t key, uint32_t row) { all.items.push_back({0, row, key}); });
    Write(all, start, to);
  }

  // Selects from a range of logical shards the rows whose last step is `min_last_step` or later,
  // the removed keys, which the journal cuts, and the keys that wait for admission. Adds the number
  // of all rows of each logical shard to live[logical shard - range.first].
  ShardSelection Select(LogicalRange range, uint32_t min_last_step, int64_t* live) {
    ShardSelection selection;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.VisitAll([&](const auto& rows) {
      records_.index().ForEach([&](int64_t key, uint32_t row) {
        const uint32_t logical = LogicalShard(MurmurHash3(key));
        if (!range.contains(logical)) return;
        ++live[logical - range.first];
        if (min_last_step > 0 && rows.header(row)->last_step < min_last_step) return;
        selection.items.push_back({logical, row, key});
      });
    });
    RemovalJournal& journal = records_.journal();
    selection.journal_whole = journal.whole();
    journal.Cut(
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
    std::shared_lock<std::shared_mutex> lock(mutex_);
    Write(selection, start, to);
  }

  // See removal_journal.h.
  void StartJournal(size_t limit) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.journal().Start(limit);
  }
  void DropCutRemovals() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.journal().DropCut();
  }
  bool journal_whole() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return records_.journal().whole();
  }

  // Writes the records at the items' positions in the columns to the shard, and overwrites the
  // records of keys that it already has. `step` is the table's.
  void Import(BatchItems items, const ConstRecordColumns& from, uint32_t step) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.journal().Break();
    epoch_.End();
    records_.index().Reserve(records_.index().size() + items.size);
    constexpr size_t kPiece = 1024;  // between which memory is bounded
    for (size_t i = 0; i < items.size; ++i) {
      records_.Import(items.data[i], from, step);
      if ((i + 1) % kPiece == 0 || i + 1 == items.size) records_.Spill(kNoStep, 0);
    }
  }

  // Snapshots, see undo_log.h. They are numbered from the oldest, which is 0.
  void TakeSnapshot() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.undo().Begin();
  }
  void DropSnapshot(size_t number) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.undo().Drop(number);
  }
  // `step` is the snapshot's.
  void RestoreSnapshot(size_t number, uint32_t step) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.journal().Break();
    epoch_.End();
    records_.undo().Undo(number, [&](const UndoLog::Record& record) {
      if (record.values == nullptr) {
        records_.Remove(record.key, MurmurHash3(record.key));
        return;
      }
      const int64_t frequency = record.header.frequency, last_step = record.header.last_step;
      const float* slots = record.values + recipe_->layout.dim();
      records_.Import({record.key, 0}, {&record.key, record.values, slots, &frequency, &last_step},
                      step);
    });
    records_.Spill(kNoStep, 0);
  }

  // Makes room in the index for `keys` keys in total.
  void ReserveKeys(uint64_t keys) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.index().Reserve(keys);
  }

  void Clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    records_.journal().Break();
    epoch_.End();
    records_.Clear();
    std::visit([](auto& admission) { admission.Clear(); }, admission_);
  }

  // Whether the update of this step has to end with Sweep: it makes the rows half that have cooled
  // down, and evicts, if the shard's turn has come for either.
  bool IsSweepDue(uint64_t step) const {
    return schedule_.IsSweepDue(step) || cooling_.IsDue(step);
  }
  void Sweep(uint32_t step) {
    if (cooling_.IsDue(step)) {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      const std::vector<BatchItem> cold = records_.ColdKeys(step);
      if (!cold.empty()) epoch_.End();  // numbers may change without the last step
      records_.Cool(cold, step);
    }
    if (schedule_.IsSweepDue(step)) Evict(step);
  }

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
    return records_.index().size();
  }

  void AddStatistics(TableStatistics* sum) {
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      records_.AddStatistics(sum);
      sum->bytes += std::visit([](const auto& admission) { return admission.bytes(); }, admission_);
    }
    counters_.AddTo(sum);
  }

 private:
  static constexpr uint32_t kNoStep = UINT32_MAX;

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
    std::vector<OnDisk> below;
    std::visit(
        [&](const auto& rows) {
          const auto use = [&](const BatchItem& item, uint64_t, uint32_t row) {
            counts.hits += row != kNoRow;
            if (records_.IsOnDisk(row)) return below.push_back({row, item.position});
            if (!sink.Wants(item.position, StampOf(rows, row))) return;
            ++counts.wanted;
            float* to = sink.place(item.position);
            row == kNoRow ? recipe_->ReadInitial(rows, item.key, to) : rows.CopyWeights(row, to);
          };
          const auto ask = [&](const BatchItem& item, uint32_t row) {
            if (!records_.IsOnDisk(row)) sink.Prefetch(rows, item.position, row);
          };
          Pipeline(records_.index(), items, ask, use);
        },
        records_.memory());
    if (below.empty()) return counts;
    records_.VisitAll([&](const auto& rows) {
      InPieces(below, rows, [&](const OnDisk& one) {
        if (!sink.Wants(one.position, StampOf(rows, one.row))) return;
        ++counts.wanted;
        rows.CopyWeights(one.row, sink.place(one.position));
      });
    });
    return counts;
  }

  // A row on disk, and the position in the batch of a key that it belongs to.
  struct OnDisk {
    uint32_t row;
    uint32_t position;
  };

  // Calls visit(item) for each item, in order, a piece at a time, whose rows on disk are read
  // together.
  template <class Items, class RowsOfShard, class Visit>
  static void InPieces(const Items& items, const RowsOfShard& rows, const Visit& visit) {
    constexpr size_t kPiece = 1024, kAhead = 8;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i % kPiece == 0) rows.Load(items.data() + i, std::min(kPiece, items.size() - i));
      if (i + kAhead < items.size()) {
        rows.template PrefetchRecord<Intent::kRead>(items[i + kAhead].row);
      }
      visit(items[i]);
    }
  }

  void Write(const ShardSelection& selection, uint64_t start, const RecordColumns& to) const {
    records_.VisitAll([&](const auto& rows) {
      InPieces(selection.items, rows, [&](const auto& item) {
        to.Write(recipe_->layout, rows, item.key, item.row, start++);
      });
    });
  }

  template <class AdmissionOfShard, class RowsOfShard, class Sink>
  ReadCounts LookupOrInsert(BatchItems items, uint32_t step, AdmissionOfShard* admission,
                            RowsOfShard* rows, const Sink& sink) {
    ReadCounts counts;
    const auto use = [&](const BatchItem& item, uint64_t hash, uint32_t row) {
      // Since stage 2, another occurrence of the key in the batch may have inserted an absent key
      // or promoted a half row.
      if (row == kNoRow || rows->IsHalf(row)) row = records_.index().Find(item.key, hash);
      const bool wanted = sink.Wants(item.position, StampOf(*rows, row));
      counts.wanted += wanted;
      if (row == kNoRow) {
        if (!admission->Admit(item.key, step)) {
          if (wanted) recipe_->ReadInitial(*rows, item.key, sink.place(item.position));
          ++counts.rejects;
          return;
        }
        records_.undo().Note(*rows, item.key, hash, kNoRow);
        row = recipe_->MakeInitial(rows, item.key);
        records_.index().Insert(item.key, hash, row);
        ++counts.inserts;
      } else {
        records_.undo().Note(*rows, item.key, hash, row);
      }
      const uint32_t before = rows->header(row)->last_step;
      const uint32_t touched = rows->Touch(row, step, recipe_->prior.empty());
      if (touched != row) *records_.index().FindValue(item.key, hash) = touched;
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
    Pipeline(records_.index(), items, ask, use);
    return counts;
  }

  // Evicts the expired rows if `sweep` is true. If the shard is then above a high mark, evicts the
  // rows of the lowest rank until it is down to the low marks. Returns how many rows were evicted.
  uint64_t MakeRoom(uint32_t now, bool sweep) {
    KeyIndex& index = records_.index();
    const ShardMarks& marks = schedule_.marks;
    const auto is_full = [&] { return marks.IsFull(index.size(), records_.charge()); };
    if (!sweep && !is_full()) return 0;
    const uint64_t before = index.size();
    const auto remove = [&](const auto& row) {
      return records_.Remove(row.key, MurmurHash3(row.key));
    };
    std::vector<RankedRow> ranked = std::visit(
        [&](const auto& policy) {
          return records_.VisitAll([&](const auto& rows) {
            return RankRows(policy, index, rows, recipe_->layout.dim(), [&](const auto& row) {
              return sweep && policy.Expired(row, now) && remove(row);
            });
          });
        },
        recipe_->eviction->policy);
    if (is_full()) {
      const uint64_t most = recipe_->layout.bytes() + Eviction::kIndexBytes;  // charge of one row
      const auto above = [&] { return marks.AboveLow(index.size(), records_.charge(), most); };
      RemoveLowest(std::move(ranked), above, remove);
    }
    if (index.size() < before) epoch_.End();
    return before - index.size();
  }

  // How many groups a batch drains. Batches that insert nothing also advance a drain, so that soon
  // batches needn't probe two tables, and no shard has two for long.
  static uint64_t DrainShare(size_t items) { return 4 * items + 1; }

  std::shared_mutex mutex_;
  const RowRecipe* const recipe_;
  ShardRecords records_;
  AdmissionState admission_;
  const EvictionSchedule schedule_;
  const SweepSchedule cooling_;
  Epoch epoch_;
  ShardCounters counters_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_SHARD_H_
