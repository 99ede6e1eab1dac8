// Table: the dynamic embedding table. A row is created when its key is first seen; no vocabulary or
// size is fixed in advance.
//
//                    batch of keys
//                          |  Partition: by the top bits of MurmurHash3(key)
//          +---------------+---------------+
//       Shard 0         Shard 1   ...   Shard 63         one lock each
//       KeyIndex        KeyIndex        KeyIndex         key -> row number        (key_index.h)
//       Rows            Rows            Rows             row number -> record     (rows.h)
//          +---------------+---------------+
//                     ChunkArena                         memory of records, never moved
//
// A table may have a disk tier (records.h): rows that memory has no room for are in files, and come
// back before a batch uses them. Every number is that of a table in memory.
//
// A record is weights + optimizer slots + frequency + last step (row_record.h). A new row is a pure
// function of (seed, key) (initializer.h). The optimizer changes it in place (optimizers.h).
//
// Parallelism and locks
//   A batch is first partitioned by shard. Then workers process the shards in parallel, one worker
//   per shard, which takes the shard's lock once. So a lock is taken once for hundreds of keys, and
//   two concurrent batches wait only if they use the same shard at the same time. Lookups that
//   don't insert share the lock. The top bits of the hash that choose the shard also choose the
//   logical shard of a checkpoint.
//
//   Batches share one more lock above the shards, taken once per call; export, import and clear
//   hold it exclusively. So an export is a snapshot between batches. Workers never take this lock,
//   so waiting for it can't starve a batch of its workers.
//
// Order
//   Results don't depend on threads: rows are returned at the position of their key, initial rows
//   don't depend on the order of insertion, and gradients of one key are summed in the batch's
//   order. Only the order of Export depends on history; ExportShards sorts by key. Which keys are
//   admitted and evicted (admission.h, eviction.h) depends only on the batches in their order.
//
// Reading ahead
//   Peek reads the rows of a later batch, and Reread, in that batch's turn, makes them what Lookup
//   would return (stamp.h). A peek may run at the same time as any other batch.
//
// Saving
//   A save goes through the logical shards, a range at a time (ExportShards), so it needs memory
//   for a range, not for the table. A range is a snapshot: no batch runs while it is copied.
//   Batches may run between two ranges; then the save isn't of a single moment, but every record in
//   it is whole, and one that changes after the save has begun is in the next incremental save too.

#ifndef GMETA_OPS_TABLE_HOST_TABLE_H_
#define GMETA_OPS_TABLE_HOST_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <variant>
#include <vector>

#include "ops/common/for_each.h"
#include "ops/common/partition.h"
#include "ops/table/core/logical_shards.h"
#include "ops/table/core/optimizers.h"
#include "ops/table/host/open_snapshots.h"
#include "ops/table/host/record_columns.h"
#include "ops/table/host/row_sinks.h"
#include "ops/table/host/shard.h"
#include "ops/table/host/table_options.h"

namespace gmeta {

class Table {
 public:
  explicit Table(const TableOptions& options)
      : optimizer_(options.optimizer),
        recipe_(MakeRecipe(options)),
        log2_shards_(Log2Shards(options, recipe_)),
        arenas_(recipe_.layout) {
    const size_t shards = size_t{1} << log2_shards_;
    shards_.reserve(shards);
    for (size_t i = 0; i < shards; ++i) {
      shards_.push_back(std::make_unique<Shard>(&recipe_, &arenas_, i, shards));
    }
  }

  size_t dim() const { return recipe_.layout.dim(); }
  size_t slot_floats() const { return recipe_.layout.slot_floats(); }

  // The number of update calls so far.
  int64_t step() const { return step_.load(std::memory_order_relaxed); }

  // Writes the row of keys[i] to out + i * dim. A missing key gets its initial row, which is stored
  // if `insert` is true and the key is admitted.
  template <class ParallelFor>
  void Lookup(const int64_t* keys, size_t n, bool insert, float* out,
              const ParallelFor& parallel_for) {
    LookupFor(AllRows(out, dim()), keys, n, insert, parallel_for);
  }

  // Writes the rows that Lookup would write, and their stamps (stamp.h). Nothing changes, not even
  // the statistics.
  template <class ParallelFor>
  void Peek(const int64_t* keys, size_t n, float* out, int64_t* stamps,
            const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    const StampedRows sink(out, dim(), stamps);
    ForShards(keys, n, 40 + dim() / 2, parallel_for,
              [&](Shard& shard, BatchItems items) { shard.Peek(items, sink); });
  }

  // Brings the rows of a later batch from disk to memory.
  template <class ParallelFor>
  void Prefetch(const int64_t* keys, size_t n, const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    if (!recipe_.disk) return;
    ForShards(keys, n, 40 + dim() / 2, parallel_for,
              [](Shard& shard, BatchItems items) { shard.Prefetch(items); });
  }

  // Lookup, with all its effects, of keys that were peeked. `rows` and `stamps` are what the peek
  // wrote; only the rows that may have changed since are written again. Returns how many.
  template <class ParallelFor>
  uint64_t Reread(const int64_t* keys, size_t n, bool insert, const int64_t* stamps, float* rows,
                  const ParallelFor& parallel_for) {
    return LookupFor(ChangedRows(rows, dim(), stamps), keys, n, insert, parallel_for);
  }

  // Runs one optimizer step. `gradients` has dim floats for each key. Gradients of equal keys are
  // summed first, gradients of absent keys are ignored.
  template <class ParallelFor>
  void Update(const int64_t* keys, const float* gradients, size_t n, float learning_rate,
              const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    const int64_t now = step_.fetch_add(1, std::memory_order_relaxed) + 1;
    std::visit(
        [&](const auto& optimizer) {
          const auto step = recipe_.prior.With(optimizer.Begin(learning_rate, now), learning_rate);
          ForShards(keys, n, 60 + 2 * dim(), parallel_for, [&](Shard& shard, BatchItems items) {
            shard.Update(items, gradients, static_cast<uint32_t>(now), step);
          });
        },
        optimizer_);
    if (recipe_.eviction || recipe_.half.cools()) SweepDueShards(now, parallel_for);
  }

  // Removes the rows of the keys. Returns how many rows were removed.
  template <class ParallelFor>
  uint64_t Remove(const int64_t* keys, size_t n, const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    std::atomic<uint64_t> removes{0};
    ForShards(keys, n, 50, parallel_for,
              [&](Shard& shard, BatchItems items) { removes += shard.Remove(items); });
    return removes;
  }

  template <class ParallelFor>
  void Contains(const int64_t* keys, size_t n, bool* out, const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    ForShards(keys, n, 20, parallel_for,
              [&](Shard& shard, BatchItems items) { shard.Contains(items, out); });
  }

  // Exports all records. Calls allocate(number of rows, step), which returns the RecordColumns to
  // fill. If it returns nothing, the export stops and returns false. No batch runs meanwhile.
  template <class Allocate, class ParallelFor>
  bool Export(const Allocate& allocate, const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    std::vector<uint64_t> starts;
    uint64_t total = 0;
    for (const auto& shard : shards_) {
      starts.push_back(total);
      total += shard->size();
    }
    const std::optional<RecordColumns> columns = allocate(total, step());
    if (!columns) return false;
    ForEach(parallel_for, shards_.size(), total / shards_.size() * (20 + dim()),
            [&](size_t i) { shards_[i]->Export(starts[i], *columns); });
    return true;
  }

  // Exports from a range of logical shards, sorted by logical shard and key:
  //   the rows whose last step is `min_last_step` or later (0: all rows),
  //   the removed keys that the journal has noted, and
  //   the keys that wait for admission, with their exact counts.
  // Calls allocate(ShardExportSizes), which returns the ShardExportColumns to fill. If it returns
  // nothing, the export stops and returns false. No batch runs meanwhile.
  template <class Allocate, class ParallelFor>
  bool ExportShards(LogicalRange range, uint32_t min_last_step, const Allocate& allocate,
                    const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const int shift = kLog2LogicalShards - log2_shards_;
    const size_t begin = range.first >> shift;
    const size_t count = range.size() == 0 ? 0 : ((range.last - 1) >> shift) + 1 - begin;
    std::vector<ShardSelection> selections(count);
    std::vector<int64_t> live(range.size(), 0);
    ForEach(parallel_for, count, size() / shards_.size() * 20 + 1, [&](size_t i) {
      selections[i] = shards_[begin + i]->Select(range, min_last_step, live.data());
    });
    std::vector<uint64_t> starts(count);
    ShardExportSizes sizes{0, 0, 0, step(), true};
    for (size_t i = 0; i < count; ++i) {
      starts[i] = sizes.rows;
      sizes.rows += selections[i].items.size();
      sizes.removed += selections[i].removed.size();
      sizes.waiting += selections[i].waiting.size();
      sizes.journal_whole = sizes.journal_whole && selections[i].journal_whole;
    }
    const std::optional<ShardExportColumns> to = allocate(sizes);
    if (!to) return false;
    ForEach(parallel_for, count, sizes.rows / (count + 1) * (20 + dim()) + 1, [&](size_t i) {
      shards_[begin + i]->ExportSelected(selections[i], starts[i], to->records);
    });
    std::copy(live.begin(), live.end(), to->live);
    int64_t* const all_splits[] = {to->row_splits, to->removed_splits, to->waiting_splits};
    for (int64_t* splits : all_splits) std::fill_n(splits, range.size() + 1, 0);
    int64_t *removed = to->removed, *waiting = to->waiting, *counts = to->waiting_counts;
    for (const ShardSelection& selection : selections) {
      for (const auto& item : selection.items) ++to->row_splits[item.logical - range.first + 1];
      for (const auto& gone : selection.removed) {
        ++to->removed_splits[gone.logical - range.first + 1];
        *removed++ = gone.key;
      }
      for (const auto& one : selection.waiting) {
        ++to->waiting_splits[one.logical - range.first + 1];
        *waiting++ = one.key;
        *counts++ = one.count;
      }
    }
    for (int64_t* splits : all_splits) std::partial_sum(splits, splits + range.size() + 1, splits);
    return true;
  }

  // Starts the journal, which notes up to about `limit` removed keys from now on (0: none), so that
  // the next save may be incremental. An import breaks the journal.
  void StartJournal(size_t limit) {
    for (const auto& shard : shards_) {
      shard->StartJournal(limit == 0 ? 0 : std::max<size_t>(limit / shards_.size(), 2));
    }
  }

  // Forgets the removals that ExportShards has exported. Call this once they are safely saved.
  void DropCutRemovals() {
    for (const auto& shard : shards_) shard->DropCutRemovals();
  }

  // Whether every removal since StartJournal has been noted.
  bool JournalWhole() {
    return std::all_of(shards_.begin(), shards_.end(),
                       [](const auto& shard) { return shard->journal_whole(); });
  }

  // Takes a snapshot: notes all later changes (undo_log.h), so that RestoreSnapshot can undo them.
  // No batch runs meanwhile. Returns the snapshot's id.
  int64_t TakeSnapshot() {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    for (const auto& shard : shards_) shard->TakeSnapshot();
    return snapshots_.Add(step());
  }

  // Restores all records and the step from a snapshot, but not the state of admission. Returns
  // false if there is no such snapshot. No batch runs meanwhile.
  template <class ParallelFor>
  bool RestoreSnapshot(int64_t id, const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const std::optional<size_t> number = snapshots_.Number(id);
    if (!number) return false;
    step_.store(snapshots_.Step(*number), std::memory_order_relaxed);
    ForEach(parallel_for, shards_.size(), (size() / shards_.size() + 1) * (60 + dim()),
            [&](size_t i) { shards_[i]->RestoreSnapshot(*number, now()); });
    return true;
  }

  // Forgets a snapshot, if it exists.
  void DropSnapshot(int64_t id) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const std::optional<size_t> number = snapshots_.Number(id);
    if (!number) return;
    for (const auto& shard : shards_) shard->DropSnapshot(*number);
    snapshots_.Drop(*number);
  }

  // Replaces the content with n records, whose keys are distinct, and sets the step count.
  template <class ParallelFor>
  void Replace(const ConstRecordColumns& columns, size_t n, int64_t step,
               const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    for (const auto& shard : shards_) shard->Clear();
    step_.store(step, std::memory_order_relaxed);
    Import(columns, n, parallel_for);
  }

  // Adds n records to the content, and overwrites the records of keys that the table already has.
  template <class ParallelFor>
  void Merge(const ConstRecordColumns& columns, size_t n, const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    Import(columns, n, parallel_for);
  }

  // Makes room for `rows` rows in total, so that none waits for memory. A table may hold more rows.
  void Reserve(uint64_t rows) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const uint64_t held = size();
    if (rows <= held) return;
    // A shard's share is distributed like a Poisson number and never reaches six standard
    // deviations above the mean.
    const double mean = static_cast<double>(rows) / static_cast<double>(shards_.size());
    const uint64_t share = static_cast<uint64_t>(mean + 6.0 * std::sqrt(mean));
    for (const auto& shard : shards_) shard->ReserveKeys(share);
    if (recipe_.disk) return;  // memory has its share of the rows, whatever their number
    (recipe_.half.half_below == 0 ? arenas_.full : arenas_.half)
        .Reserve(rows - held + shards_.size() * ChunkArena::kBlockRows);
  }

  // Evicts now, as of step `at` (-1: its own), in the shards of `turns`. Returns the number.
  template <class ParallelFor>
  uint64_t Evict(const ParallelFor& parallel_for, int64_t at = -1, uint64_t turns = ~uint64_t{0}) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    const uint32_t step = at < 0 ? now() : static_cast<uint32_t>(at);
    std::atomic<uint64_t> evictions{0};
    ForEach(parallel_for, shards_.size(), (size() / shards_.size() + 1) * 20, [&](size_t i) {
      if (IsTurnOf(i, shards_.size(), turns)) evictions += shards_[i]->Evict(step);
    });
    return evictions;
  }

  // Exports the state of admission. Calls allocate(exact counters, bytes of the filter), which
  // returns the AdmissionColumns to fill. If it returns nothing, the export stops and returns
  // false. No batch runs meanwhile.
  template <class Allocate>
  bool ExportAdmission(const Allocate& allocate) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    uint64_t counters = 0, filter_bytes = 0;
    ForAdmissions([&](auto& admission) {
      counters += admission.counters();
      filter_bytes += admission.filter_bytes();
    });
    std::optional<AdmissionColumns> columns = allocate(counters, filter_bytes);
    if (!columns) return false;
    ForAdmissions([&](auto& admission) {
      admission.ForEachCounter([&](int64_t key, uint32_t count) {
        *columns->keys++ = key;
        *columns->counts++ = count;
      });
      columns->filter = std::copy_n(admission.filter(), admission.filter_bytes(), columns->filter);
    });
    return true;
  }

  // The number of filters, one per shard, and the bytes of each, one per counter (0: the policy has
  // no filter).
  size_t filters() const { return shards_.size(); }
  size_t filter_bytes() const { return FilterOf(0).bytes; }

  // Copies the filter of one shard to `to`. No batch runs meanwhile.
  void ExportFilter(size_t shard, uint8_t* to) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const Filter filter = FilterOf(shard);
    std::copy_n(filter.counters, filter.bytes, to);
  }

  // Replaces the state of admission with n counters and with the filters of all shards. Parts that
  // the policy doesn't need are ignored. If `filter_bytes` is 0, the filters become empty; if it is
  // any other wrong size, nothing changes and the result is false.
  bool ReplaceAdmission(const ConstAdmissionColumns& columns, size_t n, size_t filter_bytes) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const size_t own_bytes = filters() * this->filter_bytes();
    if (own_bytes != 0 && filter_bytes != 0 && filter_bytes != own_bytes) return false;
    ForAdmissions([](auto& admission) { admission.Clear(); });
    ImportAdmission(columns, n, filter_bytes, 0);
    return true;
  }

  // Adds n counters to the state of admission, and merges the filters of some shards, from shard
  // number `first` on, into the existing ones (admission.h explains how). If the sizes don't fit,
  // nothing changes and the result is false.
  bool MergeAdmission(const ConstAdmissionColumns& columns, size_t n, size_t filter_bytes,
                      size_t first) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const size_t own = this->filter_bytes();
    if (own != 0 &&
        (filter_bytes % own != 0 || first > filters() || filter_bytes / own > filters() - first)) {
      return false;
    }
    ImportAdmission(columns, n, filter_bytes, first);
    return true;
  }

  uint64_t size() const {
    uint64_t sum = 0;
    for (const auto& shard : shards_) sum += shard->size();
    return sum;
  }

  TableStatistics Statistics() const {
    TableStatistics sum;
    for (const auto& shard : shards_) shard->AddStatistics(&sum);
    sum.bytes += arenas_.bytes();
    return sum;
  }

 private:
  uint32_t now() const { return static_cast<uint32_t>(step()); }

  // Looks keys up for a sink. Returns how many rows the sink wanted.
  template <class Sink, class ParallelFor>
  uint64_t LookupFor(const Sink& sink, const int64_t* keys, size_t n, bool insert,
                     const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    const uint32_t step = now();
    std::atomic<uint64_t> wanted{0};
    ForShards(keys, n, 40 + dim() / 2, parallel_for, [&](Shard& shard, BatchItems items) {
      wanted += insert ? shard.LookupOrInsert(items, step, sink) : shard.Lookup(items, sink);
    });
    return wanted;
  }

  // Calls work(shard, its items) for every shard that has any of the keys. `cost`: ns for a key.
  template <class ParallelFor, class Work>
  void ForShards(const int64_t* keys, size_t n, size_t cost, const ParallelFor& parallel_for,
                 const Work& work) {
    if (n == 0) return;
    const Partition partition(keys, n, log2_shards_, parallel_for);
    ForEach(parallel_for, shards_.size(), n * cost / shards_.size() + 1, [&](size_t i) {
      const BatchItems items = partition[i];
      if (items.size > 0) work(*shards_[i], items);
    });
  }

  template <class ParallelFor>
  void SweepDueShards(int64_t now, const ParallelFor& parallel_for) {
    std::vector<Shard*> due;
    for (const auto& shard : shards_) {
      if (shard->IsSweepDue(static_cast<uint64_t>(now))) due.push_back(shard.get());
    }
    ForEach(parallel_for, due.size(), (size() / shards_.size() + 1) * 20,
            [&](size_t i) { due[i]->Sweep(static_cast<uint32_t>(now)); });
  }

  // Calls visit(state of the shard's admission) for each shard, in order.
  template <class Visit>
  void ForAdmissions(const Visit& visit) {
    for (const auto& shard : shards_) std::visit(visit, shard->admission());
  }

  struct Filter {
    uint8_t* counters;
    size_t bytes;
  };
  Filter FilterOf(size_t shard) const {
    return std::visit(
        [](auto& admission) { return Filter{admission.filter(), admission.filter_bytes()}; },
        shards_[shard]->admission());
  }

  void ImportAdmission(const ConstAdmissionColumns& columns, size_t n, size_t filter_bytes,
                       size_t first) {
    const uint8_t* from = columns.filter;
    const size_t own = this->filter_bytes();
    for (size_t i = first; own != 0 && from != columns.filter + filter_bytes; ++i, from += own) {
      uint8_t* to = FilterOf(i).counters;
      std::transform(from, from + own, to, to, [](uint8_t a, uint8_t b) { return std::max(a, b); });
    }
    const Partition partition(columns.keys, n, log2_shards_,
                              [](size_t total, size_t, const auto& work) {
                                if (total > 0) work(size_t{0}, total);
                              });
    for (size_t i = 0; i < shards_.size(); ++i) {
      std::visit(
          [&](auto& admission) {
            const BatchItems items = partition[i];
            for (size_t j = 0; j < items.size; ++j) {
              const auto [key, position] = items.data[j];
              admission.SetCounter(key, static_cast<uint32_t>(columns.counts[position]));
            }
          },
          shards_[i]->admission());
    }
  }

  template <class ParallelFor>
  void Import(const ConstRecordColumns& columns, size_t n, const ParallelFor& parallel_for) {
    ForShards(columns.keys, n, 60 + dim(), parallel_for,
              [&](Shard& shard, BatchItems items) { shard.Import(items, columns, now()); });
  }

  const SparseOptimizer optimizer_;
  const RowRecipe recipe_;
  const int log2_shards_;
  RowArenas arenas_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::shared_mutex snapshot_;
  OpenSnapshots snapshots_;
  std::atomic<int64_t> step_{0};
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_TABLE_H_
