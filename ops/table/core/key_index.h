// KeyIndex: int64 key -> row number, by open addressing over groups of eight slots.
//
// Layout
//   The slots form N groups of W = 8, N a power of two, M = N * W slots. A group is two adjacent
//   cache lines:
//
//     line 0: tags[8] | overflow | rows[8]      line 1: keys[8]
//
//   A tag is one byte: 0 for an empty slot, else 0x80 | seven bits of the key's hash. So zeroed
//   memory is an empty index, a new index costs no memset, and every int64 is a valid key: no key
//   value is reserved to mean "empty" or "deleted".
//
// Probing
//   A key's home is group MurmurHash3(k) mod N. The eight tags of a group are compared at once, and
//   only slots whose tag agrees are compared by key. If a group doesn't have the key, the probe
//   advances by the step of MTGenRec, section 3.2, which in slots is
//     S = ((k mod (M / W - 1) + 1) | 1) * W
//   In groups, the step is odd and N is a power of two, so the two are coprime and N probes visit
//   every group once. Keys with the same home take different paths, so there is no clustering.
//
// Where a probe may end
//   group.overflow counts the keys that passed this group because it was full when they were
//   inserted. A probe ends at the first group whose count is zero: no key that passed it is left.
//   Erasing a key empties its slot and subtracts one from the count of every group on its path. So
//   there are no tombstones: deletion breaks no probe chain and leaves nothing to clean up, and an
//   index with endless inserts and removals stays as fast as a new one. (F14 by N. Bronson and
//   X. Shi has this idea.) A miss mostly reads one cache line.
//
// Growth
//   At load 0.75 the number of groups doubles. The rows stay where they are: only keys and row
//   numbers move. They move gradually: the old groups drain into the new ones, one group for each
//   insert and a few for each batch, so no insert pays for more than a group (a drain ends within
//   M / 8 inserts, the next growth is 0.5 M away or more). During a drain, a key is in exactly one
//   of the two tables; a probe tries the new groups, then the old. Draining doesn't lower the
//   counts of the old groups: they remain upper bounds, which is all that a probe needs.
//
//   The shards of a table hold about equally many keys. If all of them grew at the same load, they
//   would grow in the same batch, and that batch would wait for as much fresh memory as the whole
//   index has. So their growth loads are spread over [0.5, 0.75] (GrowthLoad), and the doublings
//   over a third of the keys. A table takes no more memory for that: shards that grow at load 0.5
//   reach a size that they would reach a little later anyway, and when the last one has grown, the
//   load is 0.375 either way. Reserve, which knows how many keys will come, fills an index to 0.75.
//
// Invariants
//   1. size() <= 0.75 * capacity().
//   2. A key is in at most one slot of `current_` and `draining_` together.
//   3. For every key in a group table: each group on its probe path before its own has overflow >
//   0.
//   4. Groups of `draining_` before `cursor_` are empty.
//
// Thread safety: const methods may run concurrently; all others need exclusive access (Shard has
// the lock).

#ifndef GMETA_OPS_TABLE_CORE_KEY_INDEX_H_
#define GMETA_OPS_TABLE_CORE_KEY_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "ops/common/memory_block.h"
#include "ops/common/murmur_hash3.h"
#include "ops/common/prefetch.h"
#include "ops/table/core/tag_match.h"

namespace gmeta {

inline constexpr uint32_t kNoRow = UINT32_MAX;

inline constexpr double kMostLoad = 0.75;
inline constexpr double kLeastGrowthLoad = 0.5;

// The load at which shard number `shard` of `shards` grows. The last shard grows at kMostLoad.
inline double GrowthLoad(size_t shard, size_t shards) {
  const double place = static_cast<double>(shard + 1) / static_cast<double>(shards);
  return kLeastGrowthLoad + (kMostLoad - kLeastGrowthLoad) * place;
}

// The step of MTGenRec 3.2 in groups: S / W. Needs at least two groups.
inline uint64_t ProbeStep(int64_t key, uint64_t groups) {
  return (static_cast<uint64_t>(key) % (groups - 1) + 1) | 1;
}

struct alignas(128) KeyGroup {
  uint8_t tags[kTagWidth];
  uint32_t overflow;
  uint32_t rows[kTagWidth];
  alignas(64) int64_t keys[kTagWidth];
};
static_assert(sizeof(KeyGroup) == 128 && sizeof(KeyGroup) == MemoryBlock::kAlignment);

// A fixed number of groups: find, insert and erase, without growth.
class GroupTable {
 public:
  struct Slot {
    KeyGroup* group = nullptr;  // null: not found
    uint32_t index = 0;
  };

  GroupTable() = default;
  explicit GroupTable(uint64_t groups)
      : memory_(groups * sizeof(KeyGroup)), mask_(groups - 1), groups_(groups) {}

  uint64_t groups() const { return groups_; }
  uint64_t capacity() const { return groups_ * kTagWidth; }
  size_t bytes() const { return memory_.bytes(); }
  KeyGroup* data() const { return reinterpret_cast<KeyGroup*>(memory_.data()); }
  void Populate() const { memory_.Populate(); }

  void Prefetch(uint64_t hash) const {
    const KeyGroup* home = data() + (hash & mask_);
    gmeta::Prefetch(home);
    gmeta::Prefetch(home->keys);
  }

  Slot Find(int64_t key, uint64_t hash) const {
    const uint8_t tag = Tag(hash);
    uint64_t at = hash & mask_;
    uint64_t step = 0;
    for (uint64_t visited = 0; visited < groups_; ++visited) {
      KeyGroup* group = data() + at;
      for (uint32_t match = MatchTag(group->tags, tag); match != 0; match &= match - 1) {
        const uint32_t index = static_cast<uint32_t>(__builtin_ctz(match));
        if (group->keys[index] == key) return {group, index};
      }
      if (group->overflow == 0) break;
      if (step == 0) step = ProbeStep(key, groups_);  // a division that few probes need
      at = (at + step) & mask_;
    }
    return {};
  }

  // Inserts a key. The key must be absent, and some slot must be empty.
  void Insert(int64_t key, uint64_t hash, uint32_t row) {
    uint64_t at = hash & mask_;
    uint64_t step = 0;
    for (;;) {
      KeyGroup* group = data() + at;
      const uint32_t empty = MatchEmpty(group->tags);
      if (empty != 0) {
        const uint32_t index = static_cast<uint32_t>(__builtin_ctz(empty));
        group->tags[index] = Tag(hash);
        group->rows[index] = row;
        group->keys[index] = key;
        return;
      }
      ++group->overflow;
      if (step == 0) step = ProbeStep(key, groups_);
      at = (at + step) & mask_;
    }
  }

  // Empties a slot that Find returned, and subtracts one from the count of each group that its key
  // passed.
  void Erase(Slot slot, uint64_t hash) {
    const int64_t key = slot.group->keys[slot.index];
    slot.group->tags[slot.index] = 0;
    uint64_t at = hash & mask_;
    const uint64_t step = data() + at == slot.group ? 0 : ProbeStep(key, groups_);
    for (; data() + at != slot.group; at = (at + step) & mask_) --data()[at].overflow;
  }

 private:
  // The tag's bits lie between the top bits, which choose the shard, and the low bits, which choose
  // the group.
  static uint8_t Tag(uint64_t hash) { return static_cast<uint8_t>(0x80 | ((hash >> 40) & 0x7f)); }

  MemoryBlock memory_;
  uint64_t mask_ = 0;
  uint64_t groups_ = 0;
};

class KeyIndex {
 public:
  static constexpr uint64_t kFewestGroups = 2;

  explicit KeyIndex(double growth_load = kMostLoad)
      : growth_load_(growth_load), current_(kFewestGroups), most_keys_(KeysAt(growth_load)) {}

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
    GroupTable::Slot slot = current_.Find(key, hash);
    if (slot.group == nullptr && is_draining()) slot = draining_.Find(key, hash);
    return slot.group == nullptr ? kNoRow : slot.group->rows[slot.index];
  }

  // A pointer to the row of a key, through which it can be changed; null if the key is absent.
  uint32_t* FindValue(int64_t key, uint64_t hash) {
    GroupTable::Slot slot = current_.Find(key, hash);
    if (slot.group == nullptr && is_draining()) slot = draining_.Find(key, hash);
    return slot.group == nullptr ? nullptr : &slot.group->rows[slot.index];
  }

  // Adds a key, which must be absent.
  void Insert(int64_t key, uint64_t hash, uint32_t row) {
    if (size_ == most_keys_) {
      Grow(2 * current_.groups());
      most_keys_ = KeysAt(growth_load_);
    }
    current_.Insert(key, hash, row);
    ++size_;
    Drain(1);
  }

  // Removes a key. Returns the row that it had, or kNoRow.
  uint32_t Erase(int64_t key, uint64_t hash) {
    GroupTable* table = &current_;
    GroupTable::Slot slot = table->Find(key, hash);
    if (slot.group == nullptr && is_draining()) {
      table = &draining_;
      slot = table->Find(key, hash);
    }
    if (slot.group == nullptr) return kNoRow;
    const uint32_t row = slot.group->rows[slot.index];
    table->Erase(slot, hash);
    --size_;
    return row;
  }

  // Moves the keys of up to `groups` groups from the old table to the new one, if one is draining.
  void Drain(uint64_t groups) {
    if (!is_draining()) return;
    for (; groups > 0 && cursor_ < draining_.groups(); --groups, ++cursor_) {
      KeyGroup& group = draining_.data()[cursor_];
      for (uint32_t full = MatchFull(group.tags); full != 0; full &= full - 1) {
        const uint32_t index = static_cast<uint32_t>(__builtin_ctz(full));
        const int64_t key = group.keys[index];
        current_.Insert(key, MurmurHash3(key), group.rows[index]);
        group.tags[index] = 0;
      }
    }
    if (cursor_ == draining_.groups()) draining_ = GroupTable();
  }

  // Makes room for `keys` keys at once: for bulk loads, before the first insert.
  void Reserve(uint64_t keys) {
    if (keys <= most_keys_) return;
    uint64_t groups = current_.groups();
    while (3 * groups * kTagWidth < 4 * keys) groups *= 2;
    if (groups > current_.groups()) {
      Grow(groups);
      current_.Populate();
    }
    most_keys_ = KeysAt(kMostLoad);
  }

  void Clear() { *this = KeyIndex(growth_load_); }

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
      visit(group.keys[index], group.rows[index]);
    }
  }

 private:
  uint64_t KeysAt(double load) const {
    return static_cast<uint64_t>(load * static_cast<double>(capacity()));
  }

  void Grow(uint64_t groups) {
    Drain(draining_.groups());  // an earlier growth has drained already, except after Reserve
    draining_ = std::exchange(current_, GroupTable(groups));
    cursor_ = 0;
  }

  double growth_load_;
  GroupTable current_;
  GroupTable draining_;  // has no groups unless a growth is in progress
  uint64_t cursor_ = 0;  // the first group of `draining_` that may hold keys
  uint64_t size_ = 0;
  uint64_t most_keys_;  // the index grows before it holds more keys than this
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_KEY_INDEX_H_
