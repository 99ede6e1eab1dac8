// Eviction as policies: which rows are evicted, so that a table stays within a bound.
//
// A policy is a struct of settings that judges a row (anything with frequency(), last_step() and
// SquaredNorm() of its weights):
//   bool Expired(const Row&, uint32_t now) const;   whether the next sweep evicts the row, with or
//                                                   without a bound
//   uint64_t Rank(const Row&) const;                when the bound is exceeded, rows of the lowest
//                                                   rank are evicted first; among rows of equal
//                                                   rank, the one with the lower key
// and is listed in EvictionPolicy and in MakeEvictionPolicy. Both functions also run on a GPU,
// where they decide alike to the last bit. A row's weights, optimizer state and metadata are
// evicted together, and the next new row reuses the record.
//
// When eviction runs
//   By load, at the start of an inserting lookup, in each shard that has keys of the batch, before
//   any key of the batch is found. So no batch evicts its own rows, and the rows that one batch
//   inserts may exceed the bound. Each of S shards has a share of the bound. A shard that holds
//   more than its high mark evicts down to its low mark, by exact selection over the shard's rows.
//   The marks are a sixteenth of a share apart, so eviction looks at sixteen rows for each row
//   inserted, whatever the size of the table. The high marks of the shards are spread evenly over
//   another sixteenth, so the shards reach them one after another, and few shards evict in the same
//   batch.
//   By time, at the end of an update: each shard sweeps out its expired rows once in a fixed number
//   of steps, and the sweeps of the shards are again spread evenly.
//   By request: Table::Evict does both in all shards.
//   Eviction by load and by time depends only on the shard's keys and the table's step. It is
//   deterministic for a trace, whatever the threads, also across a checkpoint.
//
// For the bound in bytes, a row counts as its record plus kIndexBytes for its share of the key
// index, on any device the same, so that the same rows are evicted. The memory that the table
// allocates is at most about that: a GPU's index takes up to kIndexBytes, host memory's up to 28,
// and the table allocates records in chunks of up to a sixteenth of the bound.

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

#include "ops/common/host_device.h"
#include "ops/table/core/sweep_schedule.h"

namespace gmeta {

// Base of policies that evict only when a bound is exceeded.
struct NeverExpires {
  static constexpr bool kReadsWeights = false;  // of rows that it judges
  template <class Row>
  GMETA_HOST_DEVICE static bool Expired(const Row&, uint32_t) {
    return false;
  }
};

// Least recently used first: by last step, then frequency.
struct EvictByAge : NeverExpires {
  template <class Row>
  GMETA_HOST_DEVICE static uint64_t Rank(const Row& row) {
    return uint64_t{row.last_step()} << 32 | row.frequency();
  }
};

// Least frequently used first: by frequency, then last step.
struct EvictByFrequency : NeverExpires {
  template <class Row>
  GMETA_HOST_DEVICE static uint64_t Rank(const Row& row) {
    return uint64_t{row.frequency()} << 32 | row.last_step();
  }
};

// Time to live: rows last used more than `steps` steps ago expire; under a bound, by age.
struct EvictExpired {
  static constexpr bool kReadsWeights = false;

  uint32_t steps;

  template <class Row>
  GMETA_HOST_DEVICE bool Expired(const Row& row, uint32_t now) const {
    return uint64_t{row.last_step()} + steps < now;
  }
  template <class Row>
  GMETA_HOST_DEVICE static uint64_t Rank(const Row& row) {
    return EvictByAge::Rank(row);
  }
};

// Rows of an L2 norm below the threshold expire; under a bound, by norm.
struct EvictByNorm {
  static constexpr bool kReadsWeights = true;

  double threshold;

  template <class Row>
  GMETA_HOST_DEVICE bool Expired(const Row& row, uint32_t) const {
    return row.SquaredNorm() < threshold * threshold;
  }
  template <class Row>
  GMETA_HOST_DEVICE static uint64_t Rank(const Row& row) {
    const double norm = row.SquaredNorm();  // not negative, so its bits sort as the number does
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

// A policy and its bounds and sweep interval, for a whole table. Zero means no such bound or no
// sweeps.
struct Eviction {
  static constexpr uint64_t kIndexBytes = 48;

  EvictionPolicy policy;
  uint64_t max_rows = 0;
  uint64_t max_bytes = 0;
  uint32_t sweep_steps = 0;

  // The base-2 logarithm of the number of shards: at most `most`, and so few shards that each one's
  // share is at least 1024 rows. Keys are spread over shards by their hash, and with small shares
  // one shard would exceed its share while others have room.
  int Log2Shards(int most, size_t record_bytes) const {
    constexpr uint64_t kSmallestShare = 1024;
    uint64_t rows = max_rows == 0 ? UINT64_MAX : max_rows;
    if (max_bytes != 0) rows = std::min(rows, max_bytes / (record_bytes + kIndexBytes));
    int log2_shards = 0;
    while (log2_shards < most && rows >> (log2_shards + 1) >= kSmallestShare) ++log2_shards;
    return log2_shards;
  }
};

// A row that may be evicted. Rows compare in the order in which they are evicted.
struct RankedRow {
  uint64_t rank;
  int64_t key;
  uint32_t row;

  bool operator<(const RankedRow& other) const {
    return rank != other.rank ? rank < other.rank : key < other.key;
  }
};

// How many units of `size` must be evicted to bring `load` down to `mark`.
inline uint64_t Excess(uint64_t load, uint64_t mark, uint64_t size) {
  return load > mark ? (load - mark + size - 1) / size : 0;
}

// The marks between which a shard keeps its load in rows or in bytes.
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

// The marks of a shard. Its load is a number of rows (`size`) and the bytes that they charge.
struct ShardMarks {
  LoadMarks rows, bytes;

  GMETA_HOST_DEVICE bool IsFull(uint64_t size, uint64_t charge) const {
    return size > rows.high || charge > bytes.high;
  }
  GMETA_HOST_DEVICE bool IsAboveLow(uint64_t size, uint64_t charge) const {
    return size > rows.low || charge > bytes.low;
  }
  // The least number of rows to evict. A row charges at most `most`; if some of the evicted rows
  // charge less, more rows have to follow.
  uint64_t AboveLow(uint64_t size, uint64_t charge, uint64_t most) const {
    return std::max(Excess(size, rows.low, 1), Excess(charge, bytes.low, most));
  }
};

// When one shard of a table has to evict.
class EvictionSchedule {
 public:
  EvictionSchedule() = default;
  EvictionSchedule(const Eviction& eviction, size_t shard, size_t shards)
      : marks{LoadMarks::Of(eviction.max_rows, shard, shards),
              LoadMarks::Of(eviction.max_bytes, shard, shards)},
        sweeps_(eviction.sweep_steps, shard, shards) {}

  const ShardMarks marks;

  bool IsSweepDue(uint64_t step) const { return sweeps_.IsDue(step); }

 private:
  SweepSchedule sweeps_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_EVICTION_H_
