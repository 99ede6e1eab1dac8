// The decisions that a GPU table makes on the host: which keys it admits, and which shards evict.
// It also keeps the removal journals. It uses the CPU table's own code, shard by shard as in the
// CPU table, so that both decide alike. The GPU reports the missing keys of a batch, and the host
// returns those to insert. Which rows of a shard are evicted is decided on the GPU
// (device/eviction.cuh). A table without policies doesn't use this code, and its batches don't wait
// for the host.

#ifndef GMETA_OPS_TABLE_GPU_POLICIES_H_
#define GMETA_OPS_TABLE_GPU_POLICIES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <variant>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/table/core/admission.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/logical_shards.h"
#include "ops/table/core/removal_journal.h"

namespace gmeta {

// A key that a lookup hasn't found.
struct MissingKey {
  uint32_t position;
  int64_t key;
};

class GpuTablePolicies {
 public:
  static constexpr int kMostLog2Shards = 6;

  GpuTablePolicies(const Admission& admission, const std::optional<Eviction>& eviction,
                   size_t record_bytes, size_t half_record_bytes)
      : eviction_(eviction),
        row_charge_(record_bytes + Eviction::kIndexBytes),
        half_saves_(record_bytes - half_record_bytes),
        admits_all_(std::holds_alternative<AdmitAll>(admission)),
        log2_shards_(eviction ? eviction->Log2Shards(kMostLog2Shards, record_bytes)
                              : kMostLog2Shards) {
    const size_t shards = size_t{1} << log2_shards_;
    for (size_t i = 0; i < shards; ++i) {
      admission_.push_back(BeginAdmission(admission, shards));
      schedules_.push_back(eviction ? EvictionSchedule(*eviction, i, shards) : EvictionSchedule());
    }
    journals_.resize(shards);
    sizes_.resize(shards);
  }

  // Whether inserting lookups need decisions from the host.
  bool admits_some() const { return !admits_all_; }
  bool evict() const { return eviction_.has_value(); }
  const EvictionPolicy& eviction_policy() const { return eviction_->policy; }
  std::vector<ShardMarks> marks() const {
    std::vector<ShardMarks> marks;
    for (const EvictionSchedule& schedule : schedules_) marks.push_back(schedule.marks);
    return marks;
  }
  // The bytes that a full row counts for the bound, and how many fewer a half row does.
  uint64_t row_charge() const { return row_charge_; }
  uint64_t half_saves() const { return half_saves_; }
  int log2_shards() const { return log2_shards_; }
  size_t shards() const { return sizes_.size(); }
  size_t ShardOf(int64_t key) const { return MurmurHash3(key) >> 1 >> (63 - log2_shards_); }

  // Decides which of the missing keys, in the order of the batch, get a row. Returns 1 for an
  // admitted occurrence of a key and for all later occurrences of that key, else 0.
  std::vector<uint8_t> Admit(const std::vector<MissingKey>& missing, uint32_t step) {
    std::vector<uint8_t> admitted(missing.size());
    std::unordered_set<int64_t> made;
    for (size_t i = 0; i < missing.size(); ++i) {
      const int64_t key = missing[i].key;
      const size_t shard = ShardOf(key);
      admitted[i] =
          made.count(key) != 0 ||
          std::visit([&](auto& state) { return state.Admit(key, step); }, admission_[shard]);
      if (admitted[i]) made.insert(key);
    }
    return admitted;
  }

  // Notes how many rows each shard has, as read; and that up to n more may have come.
  void NoteSizes(const unsigned int* sizes) {
    std::copy_n(sizes, sizes_.size(), sizes_.begin());
    since_ = 0;
  }
  void MayHaveTaken(uint64_t n) { since_ += n; }

  // Whether a shard may be above a high mark, if up to n more rows come.
  bool MayBeFull(uint64_t n) const {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const uint64_t most = sizes_[i] + since_ + n;
      if (schedules_[i].marks.IsFull(most, most * row_charge_)) return true;
    }
    return false;
  }
  // Returns those of a set of shards (as bits) that were above a high mark when sizes were read.
  // `halves` has the number of half rows of each shard.
  uint64_t Full(uint64_t shards, const uint32_t* halves) const {
    uint64_t full = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const uint64_t charge = sizes_[i] * row_charge_ - halves[i] * half_saves_;
      if ((shards >> i & 1) != 0 && schedules_[i].marks.IsFull(sizes_[i], charge)) {
        full |= uint64_t{1} << i;
      }
    }
    return full;
  }
  uint64_t SweepDue(uint64_t step) const {
    uint64_t due = 0;
    for (size_t i = 0; i < schedules_.size(); ++i) {
      if (schedules_[i].IsSweepDue(step)) due |= uint64_t{1} << i;
    }
    return due;
  }
  uint64_t ShardsIn(uint64_t turns) const {
    uint64_t due = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (IsTurnOf(i, sizes_.size(), turns)) due |= uint64_t{1} << i;
    }
    return due;
  }
  uint64_t all_shards() const { return ~uint64_t{0} >> (64 - sizes_.size()); }

  // Returns where the rows of each shard begin if those of a set of shards are one after another,
  // and where the last ones end.
  std::vector<uint32_t> StartsOf(uint64_t shards) const {
    std::vector<uint32_t> starts(1);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      starts.push_back(starts.back() + static_cast<uint32_t>((shards >> i & 1) * sizes_[i]));
    }
    return starts;
  }

  // Takes shards out of a nonempty set: one, and others as long as they all have `most` rows at
  // most. Sets *rows to how many they have.
  uint64_t TakeShards(uint64_t* shards, uint64_t most, uint64_t* rows) const {
    uint64_t taken = 0;
    *rows = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if ((*shards >> i & 1) == 0 || (taken != 0 && *rows + sizes_[i] > most)) continue;
      taken |= uint64_t{1} << i;
      *rows += sizes_[i];
    }
    *shards &= ~taken;
    return taken;
  }

  // Notes that a key has been removed.
  void Removed(int64_t key) { journals_[ShardOf(key)].Note(key); }

  // Call Clear when all rows were removed, and BreakJournals when any rows may have been written.
  void Clear() {
    for (auto& state : admission_) std::visit([](auto& s) { s.Clear(); }, state);
    std::fill(sizes_.begin(), sizes_.end(), 0);
    since_ = 0;
    BreakJournals();
  }
  void BreakJournals() {
    for (RemovalJournal& journal : journals_) journal.Break();
  }

  // Returns what to save of a range beside its rows: the keys that its journals have noted, which
  // this cuts, and the keys that wait for admission.
  ShardSelection CutRange(LogicalRange range) {
    ShardSelection selection;
    const auto logical_of = [](int64_t key) { return LogicalShard(MurmurHash3(key)); };
    for (RemovalJournal& journal : journals_) {
      journal.Cut([&](int64_t key) { return range.contains(logical_of(key)); },
                  [&](int64_t key) { selection.removed.push_back({logical_of(key), key}); });
    }
    const auto wait = [&](int64_t key, uint32_t times) {
      const uint32_t logical = logical_of(key);
      if (range.contains(logical)) selection.waiting.push_back({logical, times, key});
    };
    for (const AdmissionState& state : admission_) {
      std::visit([&](const auto& counts) { counts.ForEachCounter(wait); }, state);
    }
    selection.Sort();
    return selection;
  }
  // Whether the journals of a range have noted every removal.
  bool IsWhole(LogicalRange range) const {
    const int shift = kLog2LogicalShards - log2_shards_;
    for (uint32_t i = range.first; i < range.last; ++i) {
      if (!journals_[i >> shift].whole()) return false;
    }
    return true;
  }

  std::vector<AdmissionState>& admission() { return admission_; }
  std::vector<RemovalJournal>& journals() { return journals_; }
  bool has_journal() const {
    return std::any_of(journals_.begin(), journals_.end(),
                       [](const RemovalJournal& journal) { return journal.whole(); });
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const auto& state : admission_) {
      sum += std::visit([](const auto& s) { return s.bytes(); }, state);
    }
    for (const RemovalJournal& journal : journals_) sum += journal.bytes();
    return sum;
  }

 private:
  const std::optional<Eviction> eviction_;
  const uint64_t row_charge_, half_saves_;
  const bool admits_all_;
  const int log2_shards_;
  std::vector<AdmissionState> admission_;
  std::vector<EvictionSchedule> schedules_;
  std::vector<RemovalJournal> journals_;
  std::vector<uint64_t> sizes_;  // rows of each shard when they were last read, if it evicts
  uint64_t since_ = 0;           // keys that have come since
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_POLICIES_H_
