// An index from 64-bit fingerprints of keys to the numbers of the items that have these keys, and
// the chunked array that gives out such numbers.
//
// A slot of the index is 8 bytes: the fingerprint's low 32 bits, of which the lowest choose the
// first slot to look in, and the item's number. A lookup compares the 32 bits, and reads the item,
// which holds the whole fingerprint, only where they agree: of items with other keys, it reads one
// in hundreds. Collisions go to the next free slot. A removal moves later items of the run back, so
// there are no tombstones, and lookups stay short however many items come and go. At most 7 of 10
// slots are in use; so the index takes 11 to 23 bytes an item.
//
// Items lie in chunks that never move, so growth copies no item and leaves at most one chunk idle.

#ifndef GMETA_IO_JOIN_FINGERPRINT_INDEX_H_
#define GMETA_IO_JOIN_FINGERPRINT_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/common/prefetch.h"

namespace gmeta::join {

inline constexpr uint32_t kNone = ~uint32_t{0};  // no item has this number, nor the one below

// Adds a word to a fingerprint. With the first word it is a bijection: keys of one integer never
// collide. Both operands are hashed, so sequences of similar words collide no more than random
// ones.
inline uint64_t AddWord(uint64_t fingerprint, uint64_t word) {
  const uint64_t mixed = MurmurHash3(static_cast<int64_t>(word + 0x9e3779b97f4a7c15ULL));
  return MurmurHash3(static_cast<int64_t>(fingerprint ^ mixed));
}

// An array of items, whose numbers are reused after they are given back.
template <class Item>
class Items {
 public:
  Item& operator[](uint32_t number) { return chunks_[number / kChunk][number % kChunk]; }
  const Item& operator[](uint32_t number) const {
    return chunks_[number / kChunk][number % kChunk];
  }

  // Returns the number of an unused item.
  uint32_t Take() {
    if (!free_.empty()) {
      const uint32_t number = free_.back();
      free_.pop_back();
      return number;
    }
    if (used_ >= kNone - 1) throw std::length_error("more items than 32 bits count");
    if (used_ % kChunk == 0) chunks_.push_back(std::make_unique<Item[]>(kChunk));
    return used_++;
  }

  void Give(uint32_t number) { free_.push_back(number); }

  size_t size() const { return used_ - free_.size(); }
  size_t bytes() const {
    return chunks_.size() * kChunk * sizeof(Item) + free_.capacity() * sizeof(uint32_t);
  }

 private:
  static constexpr uint32_t kChunk = uint32_t{1} << 14;

  std::vector<std::unique_ptr<Item[]>> chunks_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;
};

// The index of Items<Item>, each of which has a `fingerprint`. At most one item has each.
template <class Item>
class FingerprintIndex {
 public:
  explicit FingerprintIndex(const Items<Item>& items) : items_(items), slots_(kFirstSlots) {}

  void Prefetch(uint64_t fingerprint) const { gmeta::Prefetch(&slots_[Home(fingerprint)]); }

  // Returns the number of the item with a fingerprint, or kNone.
  uint32_t Find(uint64_t fingerprint) const {
    const size_t at = FindSlot(fingerprint);
    return at == slots_.size() ? kNone : slots_[at].number;
  }

  // Adds an item, whose fingerprint isn't in the index.
  void Insert(uint32_t number) {
    if (10 * (size_ + 1) > 7 * slots_.size()) Grow();
    Place({static_cast<uint32_t>(items_[number].fingerprint), number});
    ++size_;
  }

  // Makes another item stand for the fingerprint that both have.
  void Replace(uint32_t number, uint32_t by) {
    slots_[FindSlot(items_[number].fingerprint)].number = by;
  }

  // Removes an item that is in the index.
  void Remove(uint32_t number) {
    size_t gap = FindSlot(items_[number].fingerprint);
    const size_t mask = slots_.size() - 1;
    for (size_t at = (gap + 1) & mask; slots_[at].number != kNone; at = (at + 1) & mask) {
      // The item at `at` may move to the gap unless its first slot lies behind the gap.
      if (((at - Home(slots_[at].tag)) & mask) >= ((at - gap) & mask)) {
        slots_[gap] = slots_[at];
        gap = at;
      }
    }
    slots_[gap].number = kNone;
    --size_;
  }

  size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    uint32_t tag = 0;
    uint32_t number = kNone;
  };
  static constexpr size_t kFirstSlots = 1024;

  size_t Home(uint64_t fingerprint) const {
    return static_cast<uint32_t>(fingerprint) & (slots_.size() - 1);
  }

  size_t FindSlot(uint64_t fingerprint) const {
    const size_t mask = slots_.size() - 1;
    for (size_t at = Home(fingerprint); slots_[at].number != kNone; at = (at + 1) & mask) {
      if (slots_[at].tag == static_cast<uint32_t>(fingerprint) &&
          items_[slots_[at].number].fingerprint == fingerprint) {
        return at;
      }
    }
    return slots_.size();
  }

  void Place(Slot slot) {
    const size_t mask = slots_.size() - 1;
    size_t at = Home(slot.tag);
    while (slots_[at].number != kNone) at = (at + 1) & mask;
    slots_[at] = slot;
  }

  void Grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.number != kNone) Place(slot);
    }
  }

  const Items<Item>& items_;
  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace gmeta::join

#endif  // GMETA_IO_JOIN_FINGERPRINT_INDEX_H_
