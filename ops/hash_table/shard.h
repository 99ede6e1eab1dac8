// Shard: one of a table's sub-tables, a key index and a row store under one lock, and the passes
// that a batch makes over it.
//
// A pass takes blocks of 32 keys through four stages, so that many cache misses are in flight at
// once and a batch is bound by memory bandwidth rather than by latency:
//   1. hash the key, ask for its home group            (a block ahead of the others)
//   2. find its row number
//   3. ask for the record and for the key's row in the caller's batch
//   4. read or update the record
// Each stage is a loop of its own, not a step of one loop over keys: a prefetch waits for its
// address translation before it retires, so misses overlap only as far as the processor's window
// reaches, and a window holds dozens of turns of a short loop but three or four of a long one.
//
// A row number found in stage 2 holds through stage 4: rows never move, and nothing is erased in a
// pass. A lookup that inserts evicts before its pass (eviction.h), and asks in stage 4 whether a
// missing key is admitted (admission.h).

#ifndef GMETA_OPS_HASH_TABLE_SHARD_H_
#define GMETA_OPS_HASH_TABLE_SHARD_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <variant>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/common/prefetch.h"
#include "ops/hash_table/admission.h"
#include "ops/hash_table/eviction.h"
#include "ops/hash_table/initializer.h"
#include "ops/hash_table/key_index.h"
#include "ops/hash_table/logical_shards.h"
#include "ops/hash_table/optimizers.h"
#include "ops/hash_table/partition.h"
#include "ops/hash_table/removal_journal.h"
#include "ops/hash_table/row_record.h"
#include "ops/hash_table/row_store.h"
#include "ops/unique/unique.h"

namespace gmeta {

// How rows are made and unmade; the same for all shards of a table.
struct RowRecipe {
  RowLayout layout;
  Initializer initializer;
  float initial_slot;  // of the first slot, at most dim floats; the others start at 0
  Admission admission;
  std::optional<Eviction> eviction;
};

struct TableStatistics {
  uint64_t size = 0;      // keys now
  uint64_t capacity = 0;  // slots of the key index
  uint64_t bytes = 0;     // of index and rows, allocated
  // Counted since the table was made:
  uint64_t hits = 0;       // keys looked up and found
  uint64_t misses = 0;     // keys looked up and absent
  uint64_t inserts = 0;    // rows made by lookups
  uint64_t removes = 0;    // rows removed
  uint64_t updates = 0;    // rows updated by a gradient
  uint64_t ignored = 0;    // gradients of absent keys
  uint64_t rejects = 0;    // keys looked up and not admitted
  uint64_t evictions = 0;  // rows evicted
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
  // Number `shard` of `shards`.
  Shard(const RowRecipe* recipe, ChunkArena* arena, size_t shard, size_t shards)
      : recipe_(recipe),
        rows_(recipe->layout.bytes(), arena),
        admission_(BeginAdmission(recipe->admission, shards)),
        schedule_(recipe->eviction ? EvictionSchedule(*recipe->eviction, shard, shards)
                                   : EvictionSchedule()) {}

  // Copies rows out. A missing key reads its initial row; nothing changes but the statistics.
  void Lookup(BatchItems items, float* out) {
    const RowLayout& layout = recipe_->layout;
    uint64_t hits = 0;
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      const auto use = [&](const BatchItem& item, uint64_t, uint32_t row) {
        float* to = out + item.position * layout.dim();
        if (row == kNoRow) {
          recipe_->initializer.Fill(item.key, layout.dim(), to);
          return;
        }
        ++hits;
        CopyWeights(rows_[row], to);
      };
      const auto ask = [&](const BatchItem& item, uint32_t row) {
        PrefetchCopy<Intent::kRead>(item, row, out);
      };
      Pipeline(items, ask, use);
    }
    Count(&Counters::hits, hits);
    Count(&Counters::misses, items.size - hits);
  }

  // Copies rows out, making those of missing keys that are admitted first, and notes the use.
  // Before, rows are evicted if it is time.
  void LookupOrInsert(BatchItems items, uint32_t step, float* out) {
    uint64_t inserts = 0, rejects = 0, evictions = 0;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      if (recipe_->eviction) evictions = MakeRoom(step, false);
      std::visit(
          [&](auto& admission) {
            LookupOrInsert(items, step, &admission, out, &inserts, &rejects);
          },
          admission_);
      index_.Drain(DrainShare(items.size));
    }
    Count(&Counters::hits, items.size - inserts - rejects);
    Count(&Counters::misses, inserts + rejects);
    Count(&Counters::inserts, inserts);
    Count(&Counters::rejects, rejects);
    Count(&Counters::evictions, evictions);
  }

  // One optimizer step for each distinct key, with the sum of its gradients in the order of the
  // batch. Keys that are absent are left out.
  template <class Step>
  void Update(BatchItems items, const float* gradients, uint32_t step, const Step& optimizer) {
    const RowLayout& layout = recipe_->layout;
    const size_t dim = layout.dim();
    const DistinctGradients distinct(items, gradients, dim);
    uint64_t updates = 0;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      const auto ask = [&](const BatchItem& item, uint32_t row) {
        if (row == kNoRow) return;
        PrefetchBytes<Intent::kWrite>(rows_[row], layout.bytes());
        PrefetchBytes<Intent::kRead>(distinct[item], sizeof(float) * dim);
      };
      const auto use = [&](const BatchItem& item, uint64_t, uint32_t row) {
        if (row == kNoRow) return;
        ++updates;
        char* record = rows_[row];
        RowLayout::header(record)->last_step = step;
        optimizer(dim, distinct[item], RowLayout::weights(record), layout.slots(record));
      };
      Pipeline(distinct.items(), ask, use);
      index_.Drain(DrainShare(items.size));
    }
    Count(&Counters::updates, updates);
    Count(&Counters::ignored, distinct.items().size - updates);
  }

  uint64_t Remove(BatchItems items) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    uint64_t removes = 0;
    for (size_t i = 0; i < items.size; ++i) {
      removes += RemoveRow(items.data[i].key, MurmurHash3(items.data[i].key));
    }
    Count(&Counters::removes, removes);
    return removes;
  }

  void Contains(BatchItems items, bool* out) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto ask = [](const BatchItem&, uint32_t) {};
    const auto use = [&](const BatchItem& item, uint64_t, uint32_t row) {
      out[item.position] = row != kNoRow;
    };
    Pipeline(items, ask, use);
  }

  // Writes all records to places `start`, start + 1, ... of the columns.
  void Export(uint64_t start, const RecordColumns& to) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    index_.ForEach([&](int64_t key, uint32_t row) { ExportRow(key, row, start++, to); });
  }

  // The rows of a range of logical shards whose last step is `min_last_step` or later, and the keys
  // that were removed from them, which the journal cuts. Adds the number of all their rows to
  // live[logical shard - range.first].
  ShardSelection Select(LogicalRange range, uint32_t min_last_step, int64_t* live) {
    ShardSelection selection;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    index_.ForEach([&](int64_t key, uint32_t row) {
      const uint32_t logical = LogicalShard(MurmurHash3(key));
      if (!range.contains(logical)) return;
      ++live[logical - range.first];
      if (min_last_step > 0 && RowLayout::header(rows_[row])->last_step < min_last_step) return;
      selection.items.push_back({logical, row, key});
    });
    std::sort(selection.items.begin(), selection.items.end());
    selection.journal_whole = journal_.whole();
    journal_.Cut(
        [&](int64_t key) { return range.contains(LogicalShard(MurmurHash3(key))); },
        [&](int64_t key) { selection.removed.push_back({LogicalShard(MurmurHash3(key)), key}); });
    std::stable_sort(selection.removed.begin(), selection.removed.end(),
                     [](const auto& a, const auto& b) { return a.logical < b.logical; });
    return selection;
  }

  // Writes selected records to places `start`, start + 1, ... of the columns. Nothing may have
  // changed the shard since they were selected.
  void ExportSelected(const ShardSelection& selection, uint64_t start, const RecordColumns& to) {
    constexpr size_t kAhead = 8;
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto& items = selection.items;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i + kAhead < items.size()) {
        PrefetchBytes<Intent::kRead>(rows_[items[i + kAhead].row], recipe_->layout.bytes());
      }
      ExportRow(items[i].key, items[i].row, start + i, to);
    }
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

  // Writes the records of the items' positions in the columns; a key that is there already is
  // replaced.
  void Import(BatchItems items, const ConstRecordColumns& from) {
    const RowLayout& layout = recipe_->layout;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.Break();
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

  // Makes room in the index for `keys` keys in all.
  void ReserveKeys(uint64_t keys) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    index_.Reserve(keys);
  }

  void Clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    journal_.Break();
    index_.Clear();
    rows_.Clear();
    std::visit([](auto& admission) { admission.Clear(); }, admission_);
  }

  // Whether the update of a step is to end with Evict.
  bool IsSweepDue(uint64_t step) const { return schedule_.IsSweepDue(step); }

  // Evicts what has expired and what is above the bound. Returns how many rows went.
  uint64_t Evict(uint32_t step) {
    uint64_t evictions;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      evictions = recipe_->eviction ? MakeRoom(step, true) : 0;
    }
    Count(&Counters::evictions, evictions);
    return evictions;
  }

  // What admission remembers. Only for callers that have the table to themselves.
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
      sum->bytes += index_.bytes() + rows_.directory_bytes() + journal_.bytes();
      sum->bytes += std::visit([](const auto& admission) { return admission.bytes(); }, admission_);
    }
    sum->hits += counters_.hits.load(std::memory_order_relaxed);
    sum->misses += counters_.misses.load(std::memory_order_relaxed);
    sum->inserts += counters_.inserts.load(std::memory_order_relaxed);
    sum->removes += counters_.removes.load(std::memory_order_relaxed);
    sum->updates += counters_.updates.load(std::memory_order_relaxed);
    sum->ignored += counters_.ignored.load(std::memory_order_relaxed);
    sum->rejects += counters_.rejects.load(std::memory_order_relaxed);
    sum->evictions += counters_.evictions.load(std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kBlock = 32;
  static constexpr size_t kAhead = 16;

  struct Counters {
    std::atomic<uint64_t> hits{0}, misses{0}, inserts{0}, removes{0}, updates{0}, ignored{0},
        rejects{0}, evictions{0};
  };

  // Readers count too, so that counting needs no exclusive lock: one addition a batch.
  void Count(std::atomic<uint64_t> Counters::* counter, uint64_t amount) {
    (counters_.*counter).fetch_add(amount, std::memory_order_relaxed);
  }

  template <class AdmissionOfShard>
  void LookupOrInsert(BatchItems items, uint32_t step, AdmissionOfShard* admission, float* out,
                      uint64_t* inserts, uint64_t* rejects) {
    const size_t dim = recipe_->layout.dim();
    const auto use = [&](const BatchItem& item, uint64_t hash, uint32_t row) {
      float* to = out + item.position * dim;
      // A key that was absent in stage 2 may have been inserted since, by its double in the batch.
      if (row == kNoRow) row = index_.Find(item.key, hash);
      if (row == kNoRow) {
        if (!admission->Admit(item.key, step)) {
          recipe_->initializer.Fill(item.key, dim, to);
          ++*rejects;
          return;
        }
        row = InsertInitial(item.key, hash);
        ++*inserts;
      }
      char* record = rows_[row];
      RowLayout::header(record)->Touch(step);
      CopyWeights(record, to);
    };
    const auto ask = [&](const BatchItem& item, uint32_t row) {
      if (row == kNoRow) admission->Prefetch(item.key);
      PrefetchCopy<Intent::kWrite>(item, row, out);
    };
    Pipeline(items, ask, use);
  }

  // A row, as eviction policies see it.
  class JudgedRow {
   public:
    JudgedRow(const RowLayout& layout, char* record) : layout_(layout), record_(record) {}

    uint32_t frequency() const { return RowLayout::header(record_)->frequency; }
    uint32_t last_step() const { return RowLayout::header(record_)->last_step; }
    // In float64 and in the order of the elements, so that a model can say the same.
    double SquaredNorm() const {
      const float* weights = RowLayout::weights(record_);
      double sum = 0.0;
      for (size_t i = 0; i < layout_.dim(); ++i) {
        sum += static_cast<double>(weights[i]) * static_cast<double>(weights[i]);
      }
      return sum;
    }

   private:
    const RowLayout& layout_;
    char* const record_;
  };

  // Evicts the expired rows if `sweep`, and, if the shard then is above a high mark, the rows of
  // the lowest rank until it is at the low ones. Returns how many rows went.
  uint64_t MakeRoom(uint32_t now, bool sweep) {
    const auto is_full = [&] {
      return index_.size() > schedule_.rows.high || charge() > schedule_.bytes.high;
    };
    if (!sweep && !is_full()) return 0;
    std::vector<RankedRow> rows;
    rows.reserve(index_.size());
    index_.ForEach([&](int64_t key, uint32_t row) { rows.push_back({0, key, row}); });
    const uint64_t before = rows.size();
    std::visit(
        [&](const auto& policy) {
          size_t kept = 0;
          for (size_t i = 0; i < before; ++i) {
            if (i + kAhead < before) Prefetch(rows_[rows[i + kAhead].row]);
            RankedRow row = rows[i];
            const JudgedRow judged(recipe_->layout, rows_[row.row]);
            if (sweep && policy.Expired(judged, now)) {
              RemoveRow(row.key, MurmurHash3(row.key));
            } else {
              row.rank = policy.Rank(judged);
              rows[kept++] = row;
            }
          }
          rows.resize(kept);
        },
        recipe_->eviction->policy);
    if (is_full()) {
      const auto above = [&] {
        return std::max(Excess(index_.size(), schedule_.rows.low, 1),
                        Excess(charge(), schedule_.bytes.low, RowCharge()));
      };
      auto first = rows.begin();
      for (uint64_t n = above(); n > 0; n = above()) {
        const auto last = first + static_cast<ptrdiff_t>(n);
        std::nth_element(first, last - 1, rows.end());
        for (; first != last; ++first) RemoveRow(first->key, MurmurHash3(first->key));
      }
    }
    return before - index_.size();
  }

  // One gradient for each distinct key of a shard's items: the caller's own where the key stands
  // once, which is the rule, and a sum in the order of the batch where it stands more often.
  class DistinctGradients {
   public:
    DistinctGradients(BatchItems items, const float* gradients, size_t dim)
        : items_(items), gradients_(gradients), dim_(dim) {
      std::vector<int64_t> keys(items.size);
      std::vector<int32_t> inverse(items.size);
      const size_t found = UniqueFinder().Find(
          items.size, [&](size_t i) { return items.data[i].key; }, keys.data(), inverse.data());
      if (found == items.size) return;
      distinct_.resize(found);
      sums_.resize((items.size - found) * dim);  // room enough: each has two items at least
      std::vector<float*> sum_of(found, nullptr);
      float* next = sums_.data();
      source_.assign(found, nullptr);
      for (size_t i = 0; i < items.size; ++i) {
        const int32_t place = inverse[i];
        const float* gradient = gradients + items.data[i].position * dim;
        if (source_[place] == nullptr) {
          distinct_[place] = {keys[place], static_cast<uint32_t>(place)};
          source_[place] = gradient;
          continue;
        }
        if (sum_of[place] == nullptr) {
          sum_of[place] = std::copy_n(source_[place], dim, next) - dim;
          source_[place] = sum_of[place];
          next += dim;
        }
        for (size_t j = 0; j < dim; ++j) sum_of[place][j] += gradient[j];
      }
      items_ = {distinct_.data(), found};
    }

    BatchItems items() const { return items_; }
    const float* operator[](const BatchItem& item) const {
      return source_.empty() ? gradients_ + item.position * dim_ : source_[item.position];
    }

   private:
    BatchItems items_;
    const float* const gradients_;
    const size_t dim_;
    // Empty where no key stands twice:
    std::vector<BatchItem> distinct_;
    std::vector<const float*> source_;
    std::vector<float> sums_;
  };

  // Calls ask(item, row) for each item, which prefetches, and a block later use(item, hash, row),
  // both in order; row may be kNoRow.
  template <class Ask, class Use>
  void Pipeline(BatchItems items, const Ask& ask, const Use& use) {
    uint64_t hashes[2][kBlock];  // of this block and the next
    uint32_t rows[kBlock];
    const auto hash_block = [&](size_t begin, uint64_t* to) {
      const size_t end = std::min(items.size, begin + kBlock);
      for (size_t i = begin; i < end; ++i) {
        to[i - begin] = MurmurHash3(items.data[i].key);
        index_.Prefetch(to[i - begin]);
      }
    };
    hash_block(0, hashes[0]);
    int side = 0;
    for (size_t begin = 0; begin < items.size; begin += kBlock, side ^= 1) {
      const BatchItem* block = items.data + begin;
      const uint64_t* hash = hashes[side];
      const size_t size = std::min(items.size - begin, kBlock);
      for (size_t i = 0; i < size; ++i) rows[i] = index_.Find(block[i].key, hash[i]);
      for (size_t i = 0; i < size; ++i) ask(block[i], rows[i]);
      hash_block(begin + kBlock, hashes[side ^ 1]);
      for (size_t i = 0; i < size; ++i) use(block[i], hash[i], rows[i]);
    }
  }

  // For passes that copy weights to `out`. A lookup that notes the use writes to the header.
  template <Intent kHeader>
  void PrefetchCopy(const BatchItem& item, uint32_t row, const float* out) const {
    const RowLayout& layout = recipe_->layout;
    PrefetchBytes<Intent::kWrite>(out + item.position * layout.dim(), sizeof(float) * layout.dim());
    if (row == kNoRow) return;
    Prefetch<kHeader>(rows_[row]);
    PrefetchBytes<Intent::kRead>(rows_[row], layout.weights_end());
  }

  // What the rows count for against a bound in bytes.
  uint64_t charge() const { return index_.size() * RowCharge(); }
  uint64_t RowCharge() const { return recipe_->layout.bytes() + Eviction::kIndexBytes; }

  uint32_t InsertInitial(int64_t key, uint64_t hash) {
    const RowLayout& layout = recipe_->layout;
    const uint32_t row = rows_.Allocate();
    char* record = rows_[row];
    *RowLayout::header(record) = {0, 0};
    recipe_->initializer.Fill(key, layout.dim(), RowLayout::weights(record));
    const size_t first = std::min(layout.dim(), layout.slot_floats());
    float* slots = std::fill_n(layout.slots(record), first, recipe_->initial_slot);
    std::fill_n(slots, layout.slot_floats() - first, 0.0f);
    index_.Insert(key, hash, row);
    return row;
  }

  // Takes a key out with its record. Every removal goes through here, so that the journal sees it.
  bool RemoveRow(int64_t key, uint64_t hash) {
    const uint32_t row = index_.Erase(key, hash);
    if (row == kNoRow) return false;
    rows_.Free(row);
    journal_.Note(key);
    return true;
  }

  void ExportRow(int64_t key, uint32_t row, uint64_t at, const RecordColumns& to) const {
    const RowLayout& layout = recipe_->layout;
    char* record = rows_[row];
    to.keys[at] = key;
    to.frequency[at] = RowLayout::header(record)->frequency;
    to.last_step[at] = RowLayout::header(record)->last_step;
    CopyWeights(record, to.rows + at * layout.dim());
    std::copy_n(layout.slots(record), layout.slot_floats(), to.slots + at * layout.slot_floats());
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
  RemovalJournal journal_;
  AdmissionState admission_;
  const EvictionSchedule schedule_;
  Counters counters_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TABLE_SHARD_H_
