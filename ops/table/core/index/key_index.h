// KeyIndex: int64 key -> row number: a GroupTable (key_groups.h) that grows by two fifths.
//
// Growth
//   At load 0.75, an index moves to a table of 1.4 times as many groups, so its load is at least
//   0.53 from then on, and a key takes 19 to 27 bytes. The rows stay where they are: only keys and
//   row numbers move. They move gradually: the old groups drain into the new ones, 32 for every
//   eighth insert and more after each batch, so no insert pays for more than those, and a drain is
//   over before the next growth begins. A drain reads the old groups and writes the new ones in
//   order, because homes keep their order (key_groups.h). So it is bound by memory's bandwidth, not
//   its latency, which makes up for more moves: growth by 1.4 moves a key 2.5 times, growth by 2
//   would once. During a drain, a key is in exactly one of the two tables; a probe tries the new
//   groups, then the old. Draining doesn't lower the counts of the old groups.
//
//   The shards of a table hold about equally many keys. If all of them grew at the same number of
//   keys, they would grow in the same batch, and that batch would wait for as much fresh memory as
//   the whole index has. So the sizes of shards differ: each begins at its own place (GrowthPlace)
//   between a first size and 1.4 times that. The shards then grow one after another while the
//   number of keys grows by two fifths, few have an old table at a time, and all of them together
//   take 23 to 25 bytes for a key at any time. A size rounds up to a prime, but the next one is
//   computed from the unrounded size, so places are never lost, also by Reserve.
//
// Invariants
//   1. size() <= 0.75 * capacity().
//   2. A key is in at most one slot of `current_` and `draining_` together.
//   3. Groups of `draining_` before `cursor_` are empty.
//
// Thread safety: const methods may run concurrently; all others need exclusive access (Shard has
// the lock).

#ifndef GMETA_OPS_TABLE_CORE_INDEX_KEY_INDEX_H_
#define GMETA_OPS_TABLE_CORE_INDEX_KEY_INDEX_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ops/common/murmur_hash3.h"
#include "ops/table/core/index/key_groups.h"

namespace gmeta {

inline constexpr uint32_t kNoRow = UINT32_MAX;

inline constexpr double kMostLoad = 0.75;
inline constexpr double kGrowthFactor = 1.4;

// The place of shard number `shard` of `shards` between two growths, from 0 to 1.
inline double GrowthPlace(size_t shard, size_t shards) {
  return static_cast<double>(shard) / static_cast<double>(shards);
}

// The least prime from n on, by trial division: an index of 2^32 keys takes some 10^5 of them.
inline uint64_t NextPrime(uint64_t n) {
  const auto is_prime = [](uint64_t m) {
    for (uint64_t d = 2; d * d <= m; ++d) {
      if (m % d == 0) return false;
    }
    return m >= 2;
  };
  while (!is_prime(n)) ++n;
  return n;
}

class KeyIndex {
 public:
  static constexpr uint64_t kFewestGroups = 2;

  explicit KeyIndex(double place = 0)
      : place_(place),
        wish_(kFewestGroups * std::pow(kGrowthFactor, place)),
        current_(NextPrime(Groups(wish_))) {}

  uint64_t size() const { return size_; }
  uint64_t capacity() const { return current_.capacity(); }
  size_t bytes() const { return current_.bytes() + draining_.bytes(); }
  bool is_draining() const { return draining_.groups() != 0; }

  // Prefetches the memory that Find(key) will read.
  void Prefetch(uint64_t hash) const {
    current_.Prefetch(hash);
    if (is_draining()) draining_.Prefetch(hash);
  }

  // The row of a key, or kNoRow.
  uint32_t Find(int64_t key, uint64_t hash) const {
    GroupTable::Place found = current_.Find(key, hash);
    if (found.group == nullptr && is_draining()) found = draining_.Find(key, hash);
    return found.group == nullptr ? kNoRow : found.slot().row;
  }

  // A pointer to the row of a key, through which it can be changed; null if the key is absent.
  uint32_t* FindValue(int64_t key, uint64_t hash) {
    GroupTable::Place found = current_.Find(key, hash);
    if (found.group == nullptr && is_draining()) found = draining_.Find(key, hash);
    return found.group == nullptr ? nullptr : &found.slot().row;
  }

  // Adds a key, which must be absent.
  void Insert(int64_t key, uint64_t hash, uint32_t row) {
    if (size_ == most_keys_) Grow(size_ + 1);
    current_.Insert(key, hash, row);
    ++size_;
    if (is_draining() && size_ % kDrainInserts == 0) Drain(kDrainPiece);
  }

  // Removes a key. Returns the row that it had, or kNoRow.
  uint32_t Erase(int64_t key, uint64_t hash) {
    GroupTable* table = &current_;
    GroupTable::Place found = table->Find(key, hash);
    if (found.group == nullptr && is_draining()) {
      table = &draining_;
      found = table->Find(key, hash);
    }
    if (found.group == nullptr) return kNoRow;
    const uint32_t row = found.slot().row;
    table->Erase(found, hash);
    --size_;
    return row;
  }

  // Moves the keys of the next `groups` groups from the old table to the new one, if one is
  // draining.
  void Drain(uint64_t groups) {
    if (!is_draining()) return;
    const uint64_t end = cursor_ + std::min(groups, draining_.groups() - cursor_);
    while (cursor_ < end) {
      const uint64_t piece = std::min(end - cursor_, kDrainPiece);
      MovePiece(draining_.data() + cursor_, piece);
      cursor_ += piece;
    }
    if (cursor_ == draining_.groups()) draining_ = GroupTable();
  }

  // Makes room for `keys` keys at once: for bulk loads, before the first insert.
  void Reserve(uint64_t keys) {
    if (keys <= most_keys_) return;
    Grow(keys);
    current_.Populate();
  }

  void Clear() { *this = KeyIndex(place_); }

  // Calls visit(key, row) for every key. `row` may be changed.
  template <class Visit>
  void ForEach(const Visit& visit) const {
    for (uint64_t at = 0; at < groups(); ++at) ForEachOf(at, visit);
  }
  // The same for the keys of one of groups() groups.
  uint64_t groups() const { return current_.groups() + draining_.groups(); }
  template <class Visit>
  void ForEachOf(uint64_t at, const Visit& visit) const {
    const uint64_t now = current_.groups();
    KeyGroup& group = at < now ? current_.data()[at] : draining_.data()[at - now];
    for (uint32_t full = MatchFull(group.tags); full != 0; full &= full - 1) {
      const uint32_t index = static_cast<uint32_t>(__builtin_ctz(full));
      visit(group.slots[index].key(), group.slots[index].row);
    }
  }

 private:
  // While a table drains, every eighth insert moves the keys of 32 groups: a growth has drained
  // before the keys are 1/25 more.
  static constexpr uint64_t kDrainInserts = 8, kDrainPiece = 32;

  static uint64_t Groups(double wish) { return static_cast<uint64_t>(wish); }
  uint64_t MostKeys() const {
    return static_cast<uint64_t>(kMostLoad * static_cast<double>(capacity()));
  }

  // Moves the keys of `groups` old groups. The first slot of each comes first, then the second of
  // each: keys of one old group go to one or two new ones, and a probe of a group that was written
  // just before would wait for the write.
  void MovePiece(KeyGroup* old, uint64_t groups) {
    for (int index = 0; index < kTagWidth; ++index) {
      for (KeyGroup* group = old; group != old + groups; ++group) {
        if (group->tags[index] == 0) continue;
        const int64_t key = group->slots[index].key();
        current_.Insert(key, MurmurHash3(key), group->slots[index].row);
        group->tags[index] = 0;
      }
    }
  }

  // Moves on to the first size that has room for `keys` keys.
  void Grow(uint64_t keys) {
    Drain(draining_.groups());  // an earlier growth has drained already, except before Reserve
    double wish = wish_;
    uint64_t groups;
    do {
      wish *= kGrowthFactor;
      groups = NextPrime(Groups(wish));
    } while (static_cast<double>(keys) > kMostLoad * static_cast<double>(groups * kTagWidth));
    draining_ = std::exchange(current_, GroupTable(groups));
    wish_ = wish;
    cursor_ = 0;
    most_keys_ = MostKeys();
  }

  double place_;
  double wish_;  // the number of groups before it is rounded up to a prime
  GroupTable current_;
  GroupTable draining_;  // has no groups unless a growth is in progress
  uint64_t cursor_ = 0;  // the first group of `draining_` that may hold keys
  uint64_t size_ = 0;
  uint64_t most_keys_ = MostKeys();  // the index grows before it holds more keys than this
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_INDEX_KEY_INDEX_H_
