// GroupTable: int64 key -> row number, by open addressing over a fixed number of groups of nine
// slots. KeyIndex (key_index.h) makes it grow.
//
// Layout
//   A group is two adjacent cache lines, and each slot's key and row are in one of them:
//
//     line 0: tags[9] | passed[7] | slots 0-3      line 1: slots 4-8 | -
//
//   A slot is 12 bytes: key (8) | row (4). A tag is one byte: 0 for an empty slot, else 0x80 |
//   seven bits of the key's hash. So zeroed memory is an empty table, a new table costs no memset,
//   and every int64 is a valid key: no key value is reserved to mean "empty" or "deleted".
//
// Probing
//   The number of groups N is a prime, any prime. A key's home is group floor(h N / 2^32), where h
//   is the low half of MurmurHash3(key): a multiplication instead of a division (D. Lemire, "Fast
//   Random Integer Generation in an Interval", 2019). The home rises with h, so keys that are taken
//   out of one table in the order of its groups go into a table of another size in the order of its
//   own. The nine tags of a group are compared at once, and only slots whose tag agrees are
//   compared by key. If a group doesn't have the key, the probe advances by a step between 1 and N
//   - 1 that depends on the hash (as in MTGenRec, section 3.1). N is a prime, so N probes visit
//   every group once. Keys with the same home take different paths, so there is no clustering.
//
// Where a probe may end
//   A key has one of seven classes, by its hash. group.passed[c] counts the keys of class c that
//   passed this group because it was full when they were inserted. A probe ends at the first group
//   whose count of the key's class is zero: no key of the class that passed it is left. Erasing a
//   key empties its slot and subtracts one from its counts along its path. So there are no
//   tombstones: deletion breaks no probe chain and leaves nothing to clean up, and a table with
//   endless inserts and removals stays as fast as a new one. (F14 by N. Bronson and X. Shi has this
//   idea.) Keys that passed are few: at load 0.65, 97 keys of 100 are in their home. One group in
//   twelve was passed, but because keys count by class, one miss in fifty looks beyond its home,
//   and a miss mostly reads one cache line. A count that has reached 255 stays there: it is an
//   upper bound, which is all that a probe needs.
//
// Invariants
//   1. A key is in at most one slot.
//   2. For every key: each group on its probe path before its own has passed[class of the key] > 0.
//
// Thread safety: const methods may run concurrently; all others need exclusive access.

#ifndef GMETA_OPS_TABLE_CORE_INDEX_KEY_GROUPS_H_
#define GMETA_OPS_TABLE_CORE_INDEX_KEY_GROUPS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/common/memory_block.h"
#include "ops/common/prefetch.h"
#include "ops/table/core/index/tag_match.h"

namespace gmeta {

// A key and its row. The key isn't aligned to eight bytes, so that nine slots and their tags fit in
// two lines.
struct GroupSlot {
  uint32_t key_halves[2];
  uint32_t row;

  int64_t key() const {
    int64_t key;
    std::memcpy(&key, key_halves, sizeof key);
    return key;
  }
};

struct alignas(128) KeyGroup {
  static constexpr int kClasses = 7;

  uint8_t tags[kTagWidth];
  uint8_t passed[kClasses];
  GroupSlot slots[kTagWidth];
};
static_assert(sizeof(KeyGroup) == 128 && sizeof(KeyGroup) == MemoryBlock::kAlignment);
static_assert(offsetof(KeyGroup, slots) == 16, "slot 4 starts at the second line");

class GroupTable {
 public:
  struct Place {
    KeyGroup* group = nullptr;  // null: not found
    uint32_t index = 0;

    GroupSlot& slot() const { return group->slots[index]; }
  };

  GroupTable() = default;
  // Of a prime number of groups.
  explicit GroupTable(uint64_t groups) : memory_(groups * sizeof(KeyGroup)), groups_(groups) {}

  uint64_t groups() const { return groups_; }
  uint64_t capacity() const { return groups_ * kTagWidth; }
  size_t bytes() const { return memory_.bytes(); }
  KeyGroup* data() const { return reinterpret_cast<KeyGroup*>(memory_.data()); }
  void Populate() const { memory_.Populate(); }

  uint64_t Home(uint64_t hash) const {
    return uint64_t{static_cast<uint32_t>(hash)} * groups_ >> 32;
  }
  // From bits 57 down, which lie below those that choose the shard. Needs at least two groups.
  uint64_t Step(uint64_t hash) const {
    return (uint64_t{static_cast<uint32_t>(hash >> 26)} * (groups_ - 1) >> 32) + 1;
  }
  uint64_t Next(uint64_t at, uint64_t step) const {
    at += step;
    return at < groups_ ? at : at - groups_;
  }

  void Prefetch(uint64_t hash) const {
    const char* home = reinterpret_cast<const char*>(data() + Home(hash));
    gmeta::Prefetch(home);
    gmeta::Prefetch(home + sizeof(KeyGroup) / 2);
  }

  Place Find(int64_t key, uint64_t hash) const {
    const uint8_t tag = Tag(hash);
    uint64_t at = Home(hash);
    for (uint64_t visited = 0; visited < groups_; ++visited) {
      KeyGroup* group = data() + at;
      for (uint32_t match = MatchTag(group->tags, tag); match != 0; match &= match - 1) {
        const uint32_t index = static_cast<uint32_t>(__builtin_ctz(match));
        if (group->slots[index].key() == key) return {group, index};
      }
      if (group->passed[Class(hash)] == 0) break;
      at = Next(at, Step(hash));
    }
    return {};
  }

  // Inserts a key. The key must be absent, and some slot must be empty.
  void Insert(int64_t key, uint64_t hash, uint32_t row) {
    for (uint64_t at = Home(hash);; at = Next(at, Step(hash))) {
      KeyGroup* group = data() + at;
      const uint32_t empty = MatchEmpty(group->tags);
      if (empty != 0) {
        const uint32_t index = static_cast<uint32_t>(__builtin_ctz(empty));
        group->tags[index] = Tag(hash);
        std::memcpy(group->slots[index].key_halves, &key, sizeof key);
        group->slots[index].row = row;
        return;
      }
      uint8_t& passed = group->passed[Class(hash)];
      if (passed != UINT8_MAX) ++passed;
    }
  }

  // Empties a slot that Find returned, and subtracts one from the count of each group that its key
  // passed.
  void Erase(Place place, uint64_t hash) {
    place.group->tags[place.index] = 0;
    for (uint64_t at = Home(hash); data() + at != place.group; at = Next(at, Step(hash))) {
      uint8_t& passed = data()[at].passed[Class(hash)];
      if (passed != UINT8_MAX) --passed;
    }
  }

 private:
  // The tag's bits lie between the top bits, which choose the shard, and the low half, which
  // chooses the home.
  static uint8_t Tag(uint64_t hash) { return static_cast<uint8_t>(0x80 | ((hash >> 40) & 0x7f)); }

  static uint32_t Class(uint64_t hash) {
    return (static_cast<uint32_t>(hash >> 32) & 0xff) * KeyGroup::kClasses >> 8;
  }

  MemoryBlock memory_;
  uint64_t groups_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_INDEX_KEY_GROUPS_H_
