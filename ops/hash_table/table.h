// Table: the dynamic embedding table. Rows come to be when their key is first seen; there is no
// vocabulary and no size to fix beforehand.
//
//                    batch of keys
//                          |  Partition: by the top bits of MurmurHash3(key)
//          +---------------+---------------+
//       Shard 0         Shard 1   ...   Shard 63         a lock each
//       KeyIndex        KeyIndex        KeyIndex         key -> row number        (key_index.h)
//       RowStore        RowStore        RowStore         row number -> record     (row_store.h)
//          +---------------+---------------+
//                     ChunkArena                         memory of records, never moved
//
// A record is weights + optimizer slots + frequency + last step (row_record.h). A new row is a pure
// function of (seed, key) (initializer.h). The optimizer runs where the record is (optimizers.h).
//
// Parallelism and locks
//   A batch is partitioned first; then shards are worked on in parallel, each by one worker, which
//   takes the shard's lock once. So a lock is taken once for hundreds of keys, workers of one batch
//   never wait for each other, and two batches at a time wait only where they meet in a shard.
//   Lookups that don't insert share the lock. The number of shards is far above the number of
//   workers, and the top bits of the hash that choose the shard are the ones that choose the
//   logical shard of a checkpoint.
//
//   Above the shards there is one more lock, taken once a call: batches share it, and export,
//   import and clear have it alone. So an export is a snapshot between batches, not through the
//   middle of one. Workers never take it, so waiting for it can't starve a batch of its workers.
//
// Order
//   Results don't depend on threads: rows come back at the position of their key, initial rows
//   don't depend on the order of insertion, and gradients of a key that stands twice in a batch are
//   added up in the batch's order before one update. Only the order of Export does depend on
//   history; ExportShards sorts by key.
//
// Saving
//   A save goes through the logical shards, a range at a time (ExportShards), so it needs memory
//   for a range, not for the table. A range is a snapshot: no batch runs while it is copied.
//   Batches may run between two ranges; then the save as a whole is of no one moment, but every
//   record in it is whole, and all that changes after the save has begun is in the next incremental
//   save, because its last step isn't below the step at which this one began. Who wants a save of
//   one moment saves between two steps.

#ifndef GMETA_OPS_HASH_TABLE_TABLE_H_
#define GMETA_OPS_HASH_TABLE_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <variant>
#include <vector>

#include "ops/hash_table/logical_shards.h"
#include "ops/hash_table/optimizers.h"
#include "ops/hash_table/partition.h"
#include "ops/hash_table/shard.h"

namespace gmeta {

// How much an export of logical shards holds.
struct ShardExportSizes {
  uint64_t rows;
  uint64_t removed;
  int64_t step;
  bool journal_whole;  // `removed` is complete: the save may be an increment
};

// Where it goes. Splits have an entry more than there are logical shards, as a ragged tensor's.
struct ShardExportColumns {
  RecordColumns records;
  int64_t* row_splits;
  int64_t* removed;
  int64_t* removed_splits;
  int64_t* live;  // rows of each logical shard, saved or not
};

struct TableOptions {
  size_t dim = 1;
  SparseOptimizer optimizer = Sgd{};
  Initializer initializer;
  int log2_shards = 6;  // at most kLog2LogicalShards
};

class Table {
 public:
  explicit Table(const TableOptions& options)
      : optimizer_(options.optimizer),
        log2_shards_(options.log2_shards),
        recipe_(MakeRecipe(options)),
        arena_(recipe_.layout.bytes()) {
    shards_.reserve(size_t{1} << log2_shards_);
    for (size_t i = 0; i < size_t{1} << log2_shards_; ++i) {
      shards_.push_back(std::make_unique<Shard>(&recipe_, &arena_));
    }
  }

  size_t dim() const { return recipe_.layout.dim(); }
  size_t slot_floats() const { return recipe_.layout.slot_floats(); }

  // Update calls so far.
  int64_t step() const { return step_.load(std::memory_order_relaxed); }

  // Row of keys[i] to out + i * dim. A missing key gets its initial row, which is stored if
  // `insert`.
  template <class ParallelFor>
  void Lookup(const int64_t* keys, size_t n, bool insert, float* out,
              const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    const uint32_t now = static_cast<uint32_t>(step());
    ForShards(keys, n, 40 + dim() / 2, parallel_for, [&](Shard& shard, BatchItems items) {
      if (insert) {
        shard.LookupOrInsert(items, now, out);
      } else {
        shard.Lookup(items, out);
      }
    });
  }

  // One optimizer step. `gradients` has dim floats for each key; those of equal keys are summed
  // first, those of absent keys are left out.
  template <class ParallelFor>
  void Update(const int64_t* keys, const float* gradients, size_t n, float learning_rate,
              const ParallelFor& parallel_for) {
    std::shared_lock<std::shared_mutex> lock(snapshot_);
    const int64_t now = step_.fetch_add(1, std::memory_order_relaxed) + 1;
    std::visit(
        [&](const auto& optimizer) {
          const auto step = optimizer.Begin(learning_rate, now);
          ForShards(keys, n, 60 + 2 * dim(), parallel_for, [&](Shard& shard, BatchItems items) {
            shard.Update(items, gradients, static_cast<uint32_t>(now), step);
          });
        },
        optimizer_);
  }

  // Returns how many rows were removed.
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

  // Calls allocate(number of rows, step), which returns the RecordColumns to fill (or nothing: then
  // the export is given up and false returned). No batch runs meanwhile.
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
    parallel_for(shards_.size(), total / shards_.size() * (20 + dim()),
                 [&](size_t first, size_t last) {
                   for (size_t i = first; i < last; ++i) shards_[i]->Export(starts[i], *columns);
                 });
    return true;
  }

  // Exports the rows of a range of logical shards whose last step is `min_last_step` or later (0:
  // all), sorted by logical shard and key, and the keys that the journal has noted for them.
  // allocate(ShardExportSizes) returns the ShardExportColumns to fill, or nothing: then the export
  // is given up and false returned. No batch runs meanwhile.
  template <class Allocate, class ParallelFor>
  bool ExportShards(LogicalRange range, uint32_t min_last_step, const Allocate& allocate,
                    const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    const int shift = kLog2LogicalShards - log2_shards_;
    const size_t begin = range.first >> shift;
    const size_t count = range.size() == 0 ? 0 : ((range.last - 1) >> shift) + 1 - begin;
    std::vector<ShardSelection> selections(count);
    std::vector<int64_t> live(range.size(), 0);
    parallel_for(count, size() / shards_.size() * 20 + 1, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        selections[i] = shards_[begin + i]->Select(range, min_last_step, live.data());
      }
    });
    std::vector<uint64_t> starts(count);
    ShardExportSizes sizes{0, 0, step(), true};
    for (size_t i = 0; i < count; ++i) {
      starts[i] = sizes.rows;
      sizes.rows += selections[i].items.size();
      sizes.removed += selections[i].removed.size();
      sizes.journal_whole = sizes.journal_whole && selections[i].journal_whole;
    }
    const std::optional<ShardExportColumns> to = allocate(sizes);
    if (!to) return false;
    parallel_for(count, sizes.rows / (count + 1) * (20 + dim()) + 1,
                 [&](size_t first, size_t last) {
                   for (size_t i = first; i < last; ++i) {
                     shards_[begin + i]->ExportSelected(selections[i], starts[i], to->records);
                   }
                 });
    std::copy(live.begin(), live.end(), to->live);
    std::fill_n(to->row_splits, range.size() + 1, 0);
    std::fill_n(to->removed_splits, range.size() + 1, 0);
    int64_t* removed = to->removed;
    for (const ShardSelection& selection : selections) {
      for (const auto& item : selection.items) ++to->row_splits[item.logical - range.first + 1];
      for (const auto& gone : selection.removed) {
        ++to->removed_splits[gone.logical - range.first + 1];
        *removed++ = gone.key;
      }
    }
    std::partial_sum(to->row_splits, to->row_splits + range.size() + 1, to->row_splits);
    std::partial_sum(to->removed_splits, to->removed_splits + range.size() + 1, to->removed_splits);
    return true;
  }

  // Notes up to about `limit` removed keys from now on (0: none), so that the next save may be
  // incremental. An import breaks the journal.
  void StartJournal(size_t limit) {
    for (const auto& shard : shards_) {
      shard->StartJournal(limit == 0 ? 0 : std::max<size_t>(limit / shards_.size(), 2));
    }
  }

  // The removals that ExportShards has given are safe: forget them.
  void DropCutRemovals() {
    for (const auto& shard : shards_) shard->DropCutRemovals();
  }

  // Whether every removal since StartJournal has been noted.
  bool JournalWhole() {
    return std::all_of(shards_.begin(), shards_.end(),
                       [](const auto& shard) { return shard->journal_whole(); });
  }

  // Replaces the content by n records, whose keys are distinct, and the step count.
  template <class ParallelFor>
  void Replace(const ConstRecordColumns& columns, size_t n, int64_t step,
               const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    for (const auto& shard : shards_) shard->Clear();
    step_.store(step, std::memory_order_relaxed);
    Import(columns, n, parallel_for);
  }

  // Adds n records to the content; a key that is there already is overwritten.
  template <class ParallelFor>
  void Merge(const ConstRecordColumns& columns, size_t n, const ParallelFor& parallel_for) {
    std::unique_lock<std::shared_mutex> lock(snapshot_);
    Import(columns, n, parallel_for);
  }

  uint64_t size() const {
    uint64_t sum = 0;
    for (const auto& shard : shards_) sum += shard->size();
    return sum;
  }

  TableStatistics Statistics() const {
    TableStatistics sum;
    for (const auto& shard : shards_) shard->AddStatistics(&sum);
    sum.bytes += arena_.bytes();
    return sum;
  }

 private:
  static RowRecipe MakeRecipe(const TableOptions& options) {
    return std::visit(
        [&](const auto& optimizer) {
          return RowRecipe{RowLayout(options.dim, optimizer.SlotFloats(options.dim)),
                           options.initializer, optimizer.InitialSlot()};
        },
        options.optimizer);
  }

  // Calls work(shard, its items) for every shard that the keys meet. `cost` is of one key, in
  // nanoseconds.
  template <class ParallelFor, class Work>
  void ForShards(const int64_t* keys, size_t n, size_t cost, const ParallelFor& parallel_for,
                 const Work& work) {
    if (n == 0) return;
    const Partition partition(keys, n, log2_shards_, parallel_for);
    parallel_for(shards_.size(), n * cost / shards_.size() + 1, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        const BatchItems items = partition[i];
        if (items.size > 0) work(*shards_[i], items);
      }
    });
  }

  template <class ParallelFor>
  void Import(const ConstRecordColumns& columns, size_t n, const ParallelFor& parallel_for) {
    ForShards(columns.keys, n, 60 + dim(), parallel_for,
              [&](Shard& shard, BatchItems items) { shard.Import(items, columns); });
  }

  const SparseOptimizer optimizer_;
  const int log2_shards_;
  const RowRecipe recipe_;
  ChunkArena arena_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::shared_mutex snapshot_;
  std::atomic<int64_t> step_{0};
};

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TABLE_TABLE_H_
