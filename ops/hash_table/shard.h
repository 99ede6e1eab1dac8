// Shard: one of a table's sub-tables, a key index and a row store under one lock, and the passes
// that a batch makes over it.
//
// A pass is a pipeline of three stages, some keys apart, so that many cache misses are in flight at
// once and a batch is bound by memory bandwidth rather than by latency:
//   1. hash the key, ask for its home group            (kGroupAhead keys before stage 2)
//   2. find its row number, ask for the record         (kRecordAhead keys before stage 3)
//   3. read or update the record
// A row number found in stage 2 holds through stage 3: rows never move, and nothing is erased in a
// pass.

#ifndef GMETA_OPS_HASH_TABLE_SHARD_H_
#define GMETA_OPS_HASH_TABLE_SHARD_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <variant>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/hash_table/initializer.h"
#include "ops/hash_table/key_index.h"
#include "ops/hash_table/optimizers.h"
#include "ops/hash_table/partition.h"
#include "ops/hash_table/row_record.h"
#include "ops/hash_table/row_store.h"
#include "ops/unique/unique.h"

namespace gmeta {

// How rows are made; the same for all shards of a table.
struct RowRecipe {
  RowLayout layout;
  Initializer initializer;
  float initial_slot;
};

struct TableStatistics {
  uint64_t size = 0;      // keys now
  uint64_t capacity = 0;  // slots of the key index
  uint64_t bytes = 0;     // of index and rows, allocated
  // Counted since the table was made:
  uint64_t hits = 0;     // keys looked up and found
  uint64_t misses = 0;   // keys looked up and absent
  uint64_t inserts = 0;  // rows made by lookups
  uint64_t removes = 0;  // rows removed
  uint64_t updates = 0;  // rows updated by a gradient
  uint64_t ignored = 0;  // gradients of absent keys
};

// Columns of whole records, for import (const) and export.
template <class Int, class Float>
struct BasicRecordColumns {
  Int* keys;
  Float* rows;   // dim floats a key
  Float* slots;  // slot_floats floats a key
  Int* frequency;
  Int* last_step;
};
using RecordColumns = BasicRecordColumns<int64_t, float>;
using ConstRecordColumns = BasicRecordColumns<const int64_t, const float>;

class alignas(128) Shard {
 public:
  Shard(const RowRecipe* recipe, ChunkArena* arena)
      : recipe_(recipe), rows_(recipe->layout.bytes(), arena) {}

  // Copies rows out. A missing key reads its initial row; nothing changes but the statistics.
  void Lookup(BatchItems items, float* out) {
    const RowLayout& layout = recipe_->layout;
    uint64_t hits = 0;
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      Pipeline<false>(items, [&](const BatchItem& item, uint64_t, uint32_t row) {
        float* to = out + item.position * layout.dim();
        if (row == kNoRow) {
          recipe_->initializer.Fill(item.key, layout.dim(), to);
          return;
        }
        ++hits;
        CopyWeights(rows_[row], to);
      });
    }
    Count(&Counters::hits, hits);
    Count(&Counters::misses, items.size - hits);
  }

  // Copies rows out, making those of missing keys first, and notes the use.
  void LookupOrInsert(BatchItems items, uint32_t step, float* out) {
    const RowLayout& layout = recipe_->layout;
    uint64_t inserts = 0;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      Pipeline<false>(items, [&](const BatchItem& item, uint64_t hash, uint32_t row) {
        // A key that was absent in stage 2 may have been inserted since, by its double in the
        // batch.
        if (row == kNoRow) row = index_.Find(item.key, hash);
        if (row == kNoRow) {
          row = InsertInitial(item.key, hash);
          ++inserts;
        }
        char* record = rows_[row];
        RowLayout::header(record)->Touch(step);
        CopyWeights(record, out + item.position * layout.dim());
      });
      index_.Drain(DrainShare(items.size));
    }
    Count(&Counters::hits, items.size - inserts);
    Count(&Counters::misses, inserts);
    Count(&Counters::inserts, inserts);
  }

  // One optimizer step for each distinct key, with the sum of its gradients in the order of the
  // batch. Keys that are absent are left out.
  template <class Step>
  void Update(BatchItems items, const float* gradients, uint32_t step, const Step& optimizer) {
    const RowLayout& layout = recipe_->layout;
    const size_t dim = layout.dim();
    SummedGradients sums;
    const bool doubles = sums.Add(items, gradients, dim);
    const BatchItems distinct = doubles ? sums.items() : items;
    const float* source = doubles ? sums.gradients() : gradients;
    uint64_t updates = 0;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      Pipeline<true>(distinct, [&](const BatchItem& item, uint64_t, uint32_t row) {
        if (row == kNoRow) return;
        ++updates;
        char* record = rows_[row];
        RowLayout::header(record)->last_step = step;
        optimizer(dim, source + item.position * dim, RowLayout::weights(record),
                  layout.slots(record));
      });
      index_.Drain(DrainShare(items.size));
    }
    Count(&Counters::updates, updates);
    Count(&Counters::ignored, distinct.size - updates);
  }

  uint64_t Remove(BatchItems items) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    uint64_t removes = 0;
    for (size_t i = 0; i < items.size; ++i) {
      const int64_t key = items.data[i].key;
      const uint32_t row = index_.Erase(key, MurmurHash3(key));
      if (row == kNoRow) continue;
      rows_.Free(row);
      ++removes;
    }
    Count(&Counters::removes, removes);
    return removes;
  }

  void Contains(BatchItems items, bool* out) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    Pipeline<false>(items, [&](const BatchItem& item, uint64_t, uint32_t row) {
      out[item.position] = row != kNoRow;
    });
  }

  // Writes all records to places `start`, start + 1, ... of the columns.
  void Export(uint64_t start, const RecordColumns& to) {
    const RowLayout& layout = recipe_->layout;
    std::shared_lock<std::shared_mutex> lock(mutex_);
    index_.ForEach([&](int64_t key, uint32_t row) {
      char* record = rows_[row];
      to.keys[start] = key;
      to.frequency[start] = RowLayout::header(record)->frequency;
      to.last_step[start] = RowLayout::header(record)->last_step;
      CopyWeights(record, to.rows + start * layout.dim());
      std::copy_n(layout.slots(record), layout.slot_floats(),
                  to.slots + start * layout.slot_floats());
      ++start;
    });
  }

  // Writes the records of the items' positions in the columns; a key that is there already is
  // replaced.
  void Import(BatchItems items, const ConstRecordColumns& from) {
    const RowLayout& layout = recipe_->layout;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    index_.Reserve(index_.size() + items.size);
    for (size_t i = 0; i < items.size; ++i) {
      const auto [key, position] = items.data[i];
      const uint64_t hash = MurmurHash3(key);
      uint32_t row = index_.Find(key, hash);
      if (row == kNoRow) {
        row = rows_.Allocate();
        index_.Insert(key, hash, row);
      }
      char* record = rows_[row];
      *RowLayout::header(record) = {static_cast<uint32_t>(from.frequency[position]),
                                    static_cast<uint32_t>(from.last_step[position])};
      std::copy_n(from.rows + position * layout.dim(), layout.dim(), RowLayout::weights(record));
      std::copy_n(from.slots + position * layout.slot_floats(), layout.slot_floats(),
                  layout.slots(record));
    }
  }

  void Clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    index_.Clear();
    rows_.Clear();
  }

  uint64_t size() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return index_.size();
  }

  void AddStatistics(TableStatistics* sum) {
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      sum->size += index_.size();
      sum->capacity += index_.capacity();
      sum->bytes += index_.bytes() + rows_.directory_bytes();
    }
    sum->hits += counters_.hits.load(std::memory_order_relaxed);
    sum->misses += counters_.misses.load(std::memory_order_relaxed);
    sum->inserts += counters_.inserts.load(std::memory_order_relaxed);
    sum->removes += counters_.removes.load(std::memory_order_relaxed);
    sum->updates += counters_.updates.load(std::memory_order_relaxed);
    sum->ignored += counters_.ignored.load(std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kGroupAhead = 24;
  static constexpr size_t kRecordAhead = 8;

  struct Counters {
    std::atomic<uint64_t> hits{0}, misses{0}, inserts{0}, removes{0}, updates{0}, ignored{0};
  };

  // Readers count too, so that counting needs no exclusive lock: one addition a batch.
  void Count(std::atomic<uint64_t> Counters::* counter, uint64_t amount) {
    (counters_.*counter).fetch_add(amount, std::memory_order_relaxed);
  }

  // Distinct keys of a shard's items, and the sums of their gradients.
  class SummedGradients {
   public:
    // Returns whether any key stands twice; only then are there sums.
    bool Add(BatchItems items, const float* gradients, size_t dim) {
      keys_.resize(items.size);
      inverse_.resize(items.size);
      const size_t found = finder_.Find(
          items.size, [&](size_t i) { return items.data[i].key; }, keys_.data(), inverse_.data());
      if (found == items.size) return false;
      sums_.assign(found * dim, 0.0f);
      items_.resize(found);
      for (size_t i = 0; i < found; ++i) items_[i] = {keys_[i], static_cast<uint32_t>(i)};
      for (size_t i = 0; i < items.size; ++i) {
        const float* gradient = gradients + items.data[i].position * dim;
        float* sum = sums_.data() + inverse_[i] * dim;
        for (size_t j = 0; j < dim; ++j) sum[j] += gradient[j];
      }
      return true;
    }

    BatchItems items() const { return {items_.data(), items_.size()}; }
    const float* gradients() const { return sums_.data(); }

   private:
    UniqueFinder finder_;
    std::vector<int64_t> keys_;
    std::vector<int32_t> inverse_;
    std::vector<BatchItem> items_;
    std::vector<float> sums_;
  };

  // Calls use(item, hash, row or kNoRow) for each item, in order. kWhole: records are read wholly,
  // not only their weights.
  template <bool kWhole, class Use>
  void Pipeline(BatchItems items, const Use& use) {
    constexpr size_t kRing = 32;  // a power of two, at least kGroupAhead + kRecordAhead
    static_assert(kRing >= kGroupAhead + kRecordAhead);
    uint64_t hashes[kRing];
    uint32_t rows[kRing];
    for (size_t i = 0; i < items.size + kGroupAhead + kRecordAhead; ++i) {
      // The last stage goes first: it frees the place in the ring that the first stage fills.
      if (i >= kGroupAhead + kRecordAhead) {
        const size_t at = i - kGroupAhead - kRecordAhead;
        use(items.data[at], hashes[at % kRing], rows[at % kRing]);
      }
      if (i >= kGroupAhead && i - kGroupAhead < items.size) {
        const size_t at = i - kGroupAhead;
        const uint32_t row = index_.Find(items.data[at].key, hashes[at % kRing]);
        rows[at % kRing] = row;
        if (row != kNoRow) {
          if constexpr (kWhole) {
            recipe_->layout.PrefetchRecord(rows_[row]);
          } else {
            recipe_->layout.PrefetchWeights(rows_[row]);
          }
        }
      }
      if (i < items.size) {
        const uint64_t hash = MurmurHash3(items.data[i].key);
        hashes[i % kRing] = hash;
        index_.Prefetch(hash);
      }
    }
  }

  uint32_t InsertInitial(int64_t key, uint64_t hash) {
    const RowLayout& layout = recipe_->layout;
    const uint32_t row = rows_.Allocate();
    char* record = rows_[row];
    *RowLayout::header(record) = {0, 0};
    recipe_->initializer.Fill(key, layout.dim(), RowLayout::weights(record));
    std::fill_n(layout.slots(record), layout.slot_floats(), recipe_->initial_slot);
    index_.Insert(key, hash, row);
    return row;
  }

  void CopyWeights(char* record, float* to) const {
    std::memcpy(to, RowLayout::weights(record), sizeof(float) * recipe_->layout.dim());
  }

  // Batches that insert nothing end a drain too, so that later ones needn't probe twice.
  static uint64_t DrainShare(size_t items) { return items / 4 + 1; }

  std::shared_mutex mutex_;
  const RowRecipe* const recipe_;
  KeyIndex index_;
  RowStore rows_;
  Counters counters_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TABLE_SHARD_H_
