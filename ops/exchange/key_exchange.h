// Which keys travel to which rank: both stages of MTGenRec's deduplication (section 3.3), before
// and after the one all-to-all of keys that a step has, whatever the number of its tables.
//
// Who owns what
//   The logical shard of a key is the top ten bits of its MurmurHash3 (logical_shards.h); with W
//   ranks, shard s belongs to rank s * W / 1024. So every rank knows the owner of every key without
//   asking, the owners hold about equally many keys, and a rank owns a run of neighboring shards.
//
// Stage 1, at the sender: RoutedKeys
//   The keys of each table are made distinct and ordered by owner, in one go. They are sorted by
//   owner, and an owner's keys, if there are many, by some more bits of their hash. Then they are
//   made distinct one part at a time (distinct_keys.h). A key that a batch has a hundred times
//   travels once, and so do its row on the way back and its gradient on the way to the owner.
//
// Stage 2, at the owner: OwnedKeys
//   Different ranks request some of the same keys, so the received keys are made distinct again. A
//   row is read once, however many ranks want it. `positions` says for each received key, and so
//   for each row to send back, where its row is.
//
// The message of one rank to another, in int64, for T tables and a note of m values
//
//     note[m] | counts[T] | keys of table 0 | keys of table 1 | ... | keys of table T - 1
//
//   The message itself says how long its parts are, so counts need no exchange of their own, and a
//   message that was cut, or made for other tables, is detected. The note is the caller's own: a
//   few numbers for all ranks, which travel at no extra cost.
//
// Wire order
//   A table's keys have one order on the wire, on which all ranks agree without further exchange:
//   at the sender, by owner, then as in `keys`; at the owner, by sender, then as in the message.
//   What follows (rows one way, gradients the other, row_exchange.h) is in that order and carries
//   no keys.
//
// Invariants
//   1. keys[inverse[i]] is the key at position i of the batch; keys are distinct.
//   2. count(r, t) at a sender equals count(sender, t) at owner r.
//   3. All results are functions of the arguments alone: they don't depend on the number of threads
//      or their order.
//
// Why it is fast
//   Parts of all owners and tables are independent of each other, so all of them are processed
//   together, without locks and without merging. Each key is hashed for its part, moved once, and
//   looked up in a table of 4-byte slots that covers one part only, which fits the cache near a
//   core. The number of parts follows from the number of keys, not of owners, so two ranks keep as
//   many cores busy as sixty do.

#ifndef GMETA_OPS_EXCHANGE_KEY_EXCHANGE_H_
#define GMETA_OPS_EXCHANGE_KEY_EXCHANGE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/exchange/distinct_keys.h"
#include "ops/table/core/logical_shards.h"

namespace gmeta {

// Returns the rank that owns keys with this hash.
inline size_t OwnerOf(uint64_t hash, size_t ranks) {
  return LogicalShard(hash) * ranks >> kLog2LogicalShards;
}

// Returns into how many parts, a power of two, to split the keys that one place sends or receives,
// so that a part of the largest table has about 8192.
inline size_t PartsOf(const std::vector<KeySpan>& tables, size_t places) {
  constexpr size_t kKeysOfPart = 8192;
  constexpr size_t kMostParts = 64;
  size_t most = 0;
  for (const KeySpan& table : tables) most = std::max(most, table.size / places);
  size_t parts = 1;
  while (parts < kMostParts && parts * kKeysOfPart < most) parts *= 2;
  return parts;
}

// Returns a key's part, from bits of the hash that don't affect its owner.
inline size_t PartOf(uint64_t hash, size_t parts) { return hash >> 32 & (parts - 1); }

// Stage 1: the keys of a batch, one span per table. A table's distinct keys for an owner are in the
// order of first appearance if there are few, and part by part if there are many.
class RoutedKeys {
 public:
  // Requires 1 <= ranks <= kLogicalShards, and fewer than 2^31 keys in all tables together. Without
  // `dedup`, keys are ordered by owner only.
  template <class ParallelFor>
  RoutedKeys(const std::vector<KeySpan>& tables, size_t ranks, bool dedup,
             const ParallelFor& parallel_for)
      : RoutedKeys(tables, ranks, dedup ? PartsOf(tables, ranks) : 1, dedup, parallel_for) {}

  size_t tables() const { return distinct_.batches(); }
  size_t ranks() const { return distinct_.parts() / parts_; }
  int32_t count(size_t rank, size_t table) const {
    const size_t last = (rank + 1) * parts_ - 1;
    return distinct_.base(table, last) + distinct_.count(table, last) -
           distinct_.base(table, rank * parts_);
  }
  int32_t count(size_t table) const { return distinct_.count(table); }

  // Returns the length of the message to a rank.
  int64_t MessageSize(size_t rank, size_t note_size) const {
    int64_t size = static_cast<int64_t>(note_size + tables());
    for (size_t table = 0; table < tables(); ++table) size += count(rank, table);
    return size;
  }

  // Writes the messages to all ranks, one after another; for each table its keys in wire order; and
  // for each position the place of its key among them.
  template <class ParallelFor>
  void Write(const int64_t* note, size_t note_size, int64_t* message, int64_t* const* keys,
             int32_t* const* inverse, const ParallelFor& parallel_for) const {
    std::vector<int64_t*> to(tables() * ranks());  // where a table's keys for a rank are written
    for (size_t rank = 0; rank < ranks(); ++rank) {
      message = std::copy_n(note, note_size, message);
      for (size_t table = 0; table < tables(); ++table) *message++ = count(rank, table);
      for (size_t table = 0; table < tables(); ++table) {
        to[table * ranks() + rank] = message;
        message += count(rank, table);
      }
    }
    distinct_.Write(
        keys, inverse,
        [&](size_t table, size_t part, const int64_t* from) {
          const size_t rank = part / parts_;
          const int32_t before = distinct_.base(table, part) - distinct_.base(table, rank * parts_);
          std::copy_n(from, distinct_.count(table, part), to[table * ranks() + rank] + before);
        },
        parallel_for);
  }

 private:
  template <class ParallelFor>
  RoutedKeys(const std::vector<KeySpan>& tables, size_t ranks, size_t parts, bool dedup,
             const ParallelFor& parallel_for)
      : parts_(parts),
        distinct_(
            tables, ranks * parts,
            [ranks, parts](int64_t key) {
              const uint64_t hash = MurmurHash3(key);
              return OwnerOf(hash, ranks) * parts + PartOf(hash, parts);
            },
            dedup, parallel_for) {}

  size_t parts_;  // parts per owner
  DistinctKeys distinct_;
};

// The received messages, one from each rank, one after another.
class KeyMessages {
 public:
  KeyMessages(const int64_t* message, const int32_t* splits, size_t ranks, size_t tables,
              size_t note_size)
      : ranks_(ranks),
        tables_(tables),
        note_size_(note_size),
        starts_(ranks + 1),
        messages_(message) {
    for (size_t rank = 0; rank < ranks; ++rank) starts_[rank + 1] = starts_[rank] + splits[rank];
  }

  // Returns what is wrong with the messages, if anything. Call it before any other method. `size`
  // is the number of all received values.
  std::optional<std::string> Fault(int64_t size) const {
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const int64_t length = starts_[rank + 1] - starts_[rank];
      const std::string from =
          "the message of rank " + std::to_string(rank) + " of " + std::to_string(ranks_) + " ";
      const int64_t head = static_cast<int64_t>(note_size_ + tables_);
      if (length < head) {
        return from + "has " + std::to_string(length) + " values, fewer than its note of " +
               std::to_string(note_size_) + " and the counts of " + std::to_string(tables_) +
               " tables";
      }
      if (starts_[rank + 1] > size) {
        return from + "ends at value " + std::to_string(starts_[rank + 1]) + ", but only " +
               std::to_string(size) + " have come";
      }
      int64_t left = length - head;
      for (size_t table = 0; table < tables_; ++table) {
        const int64_t count = Head(rank)[note_size_ + table];
        if (count < 0 || count > left) {
          return from + "says that it has " + std::to_string(count) + " keys of table " +
                 std::to_string(table) + " of " + std::to_string(tables_) + ", where " +
                 std::to_string(left) + " values are left of it";
        }
        left -= count;
      }
      if (left != 0) {
        return from + "has " + std::to_string(left) + " values more than the keys of its " +
               std::to_string(tables_) + " tables";
      }
    }
    if (starts_.back() == size) return std::nullopt;
    return std::to_string(size) + " values have come, but the messages of the " +
           std::to_string(ranks_) + " ranks have " + std::to_string(starts_.back());
  }

  size_t ranks() const { return ranks_; }
  size_t tables() const { return tables_; }
  const int64_t* note(size_t rank) const { return Head(rank); }
  int32_t count(size_t rank, size_t table) const {
    return static_cast<int32_t>(Head(rank)[note_size_ + table]);
  }
  int64_t count(size_t table) const {
    int64_t sum = 0;
    for (size_t rank = 0; rank < ranks_; ++rank) sum += count(rank, table);
    return sum;
  }

  // Writes for each table the received keys, in wire order.
  template <class ParallelFor>
  void WriteWireKeys(int64_t* const* wire_keys, const ParallelFor& parallel_for) const {
    struct Run {
      const int64_t* from;
      size_t size;
      int64_t* to;
    };
    std::vector<int64_t*> ends(wire_keys, wire_keys + tables_);
    std::vector<Run> runs;
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const int64_t* from = Head(rank) + note_size_ + tables_;
      for (size_t table = 0; table < tables_; ++table) {
        const size_t size = static_cast<size_t>(count(rank, table));
        runs.push_back({from, size, ends[table]});
        from += size;
        ends[table] += size;
      }
    }
    const size_t cost = 1 + static_cast<size_t>(starts_.back()) / runs.size();
    parallel_for(runs.size(), cost, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) std::copy_n(runs[i].from, runs[i].size, runs[i].to);
    });
  }

 private:
  const int64_t* Head(size_t rank) const { return messages_ + starts_[rank]; }

  size_t ranks_;
  size_t tables_;
  size_t note_size_;
  std::vector<int64_t> starts_;
  const int64_t* messages_;
};

// Stage 2: the received keys of each table, in wire order. There are so many parts that one fits
// the cache near a core. The distinct keys are in the order of first appearance if the table
// received few keys, and part by part if it received many.
class OwnedKeys : public DistinctKeys {
 public:
  template <class ParallelFor>
  OwnedKeys(const std::vector<KeySpan>& tables, const ParallelFor& parallel_for)
      : OwnedKeys(tables, PartsOf(tables, 1), parallel_for) {}

 private:
  template <class ParallelFor>
  OwnedKeys(const std::vector<KeySpan>& tables, size_t parts, const ParallelFor& parallel_for)
      : DistinctKeys(
            tables, parts, [parts](int64_t key) { return PartOf(MurmurHash3(key), parts); }, true,
            parallel_for) {}
};

}  // namespace gmeta

#endif  // GMETA_OPS_EXCHANGE_KEY_EXCHANGE_H_
