// Eviction as policies: which rows go, so that a table stays within a bound.
//
// A policy is a struct of settings that judges a row (anything with frequency(), last_step() and
// SquaredNorm() of its weights):
//   bool Expired(const Row&, uint32_t now) const;   goes at the next sweep, bound or no bound
//   uint64_t Rank(const Row&) const;                where the bound is exceeded, rows of the lowest
//                                                   rank go first; of equal rank, the lower key
// and has a place in EvictionPolicy and in MakeEvictionPolicy. Weights, optimizer state and
// metadata go together, and the record is used again by the next row.
//
// When it runs
//   By load, at the start of an inserting lookup, in each shard that the lookup meets, before any
//   key of the batch is found. So no batch evicts its own rows, and the bound may be exceeded by
//   the rows that one batch has made. Each of S shards has a share of the bound. A shard that holds
//   more than its high mark evicts down to its low mark, by exact selection over the shard's rows.
//   The marks are a sixteenth of a share apart, so a row made pays for looking at sixteen, whatever
//   the size of the table; and the high marks of the shards are spread evenly over another
//   sixteenth, so the shards come to it one after another, and a batch meets few of them. By time,
//   at the end of an update: expired rows are swept out of each shard every so many steps, the
//   shards' turns again spread evenly. By order: Table::Evict does both in all shards. Load and
//   time are functions of the shard's keys and the table's step alone: deterministic for a trace,
//   whatever the threads, and through a checkpoint.
//
// The bound in bytes charges a row its record and kIndexBytes for its share of the key index. What
// the table allocates lies near that: records come in chunks of up to a sixteenth of it.

#ifndef GMETA_OPS_TABLE_CORE_EVICTION_H_
#define GMETA_OPS_TABLE_CORE_EVICTION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace gmeta {

// Of policies that act under a bound alone.
struct NeverExpires {
  template <class Row>
  static bool Expired(const Row&, uint32_t) {
    return false;
  }
};

// Least recently used first: by last step, then frequency.
struct EvictByAge : NeverExpires {
  template <class Row>
  static uint64_t Rank(const Row& row) {
    return uint64_t{row.last_step()} << 32 | row.frequency();
  }
};

// Least frequently used first: by frequency, then last step.
struct EvictByFrequency : NeverExpires {
  template <class Row>
  static uint64_t Rank(const Row& row) {
    return uint64_t{row.frequency()} << 32 | row.last_step();
  }
};

// Time to live: rows last used more than `steps` steps ago expire; under a bound, by age.
struct EvictExpired {
  uint32_t steps;

  template <class Row>
  bool Expired(const Row& row, uint32_t now) const {
    return uint64_t{row.last_step()} + steps < now;
  }
  template <class Row>
  static uint64_t Rank(const Row& row) {
    return EvictByAge::Rank(row);
  }
};

// Rows of an L2 norm below the threshold expire; under a bound, by norm.
struct EvictByNorm {
  double threshold;

  template <class Row>
  bool Expired(const Row& row, uint32_t) const {
    return row.SquaredNorm() < threshold * threshold;
  }
  template <class Row>
  static uint64_t Rank(const Row& row) {
    const double norm = row.SquaredNorm();  // not negative, so its bits are in its order
    uint64_t bits;
    std::memcpy(&bits, &norm, sizeof bits);
    return bits;
  }
};

using EvictionPolicy = std::variant<EvictByAge, EvictByFrequency, EvictExpired, EvictByNorm>;

inline std::optional<EvictionPolicy> MakeEvictionPolicy(const std::string& name,
                                                        const std::vector<double>& p) {
  if (name == "age" && p.empty()) return EvictByAge{};
  if (name == "frequency" && p.empty()) return EvictByFrequency{};
  if (name == "expired" && p.size() == 1) return EvictExpired{static_cast<uint32_t>(p[0])};
  if (name == "norm" && p.size() == 1) return EvictByNorm{p[0]};
  return std::nullopt;
}

// A policy and when it runs, for a whole table. Zero: no such bound, no sweeps.
struct Eviction {
  static constexpr uint64_t kIndexBytes = 48;

  EvictionPolicy policy;
  uint64_t max_rows = 0;
  uint64_t max_bytes = 0;
  uint32_t sweep_steps = 0;

  // Shards so few that each one's share is 1024 rows at least: keys fall on shards by their hash,
  // and a small share would be overrun in one shard while others have room.
  int Log2Shards(int most, size_t record_bytes) const {
    constexpr uint64_t kSmallestShare = 1024;
    uint64_t rows = max_rows == 0 ? UINT64_MAX : max_rows;
    if (max_bytes != 0) rows = std::min(rows, max_bytes / (record_bytes + kIndexBytes));
    int log2_shards = 0;
    while (log2_shards < most && rows >> (log2_shards + 1) >= kSmallestShare) ++log2_shards;
    return log2_shards;
  }
};

// A row that may have to go, in the order in which rows go.
struct RankedRow {
  uint64_t rank;
  int64_t key;
  uint32_t row;

  bool operator<(const RankedRow& other) const {
    return rank != other.rank ? rank < other.rank : key < other.key;
  }
};

// How many units of `size` are to go until `load` is not above `mark`.
inline uint64_t Excess(uint64_t load, uint64_t mark, uint64_t size) {
  return load > mark ? (load - mark + size - 1) / size : 0;
}

// The marks between which a shard's load of some kind (rows or bytes) is kept.
struct LoadMarks {
  uint64_t high = UINT64_MAX;
  uint64_t low = UINT64_MAX;

  static LoadMarks Of(uint64_t bound, size_t shard, size_t shards) {
    if (bound == 0) return {};
    const uint64_t share = bound / shards;
    const uint64_t slack = share / 16;
    const uint64_t high = share - slack * shard / shards;
    return {high, high - slack};
  }
};

// When one shard of a table is to evict.
class EvictionSchedule {
 public:
  EvictionSchedule() = default;
  EvictionSchedule(const Eviction& eviction, size_t shard, size_t shards)
      : rows(LoadMarks::Of(eviction.max_rows, shard, shards)),
        bytes(LoadMarks::Of(eviction.max_bytes, shard, shards)),
        sweep_steps_(eviction.sweep_steps),
        offset_(sweep_steps_ * shard / shards) {}

  const LoadMarks rows, bytes;

  // A function of the step alone, so a table that was restored sweeps as one that ran on.
  bool IsSweepDue(uint64_t step) const {
    return sweep_steps_ != 0 && (step + offset_) % sweep_steps_ == 0;
  }

 private:
  uint64_t sweep_steps_ = 0;
  uint64_t offset_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_EVICTION_H_
