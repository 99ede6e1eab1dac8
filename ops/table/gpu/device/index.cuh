// GpuIndex: int64 key -> row number in device memory, by open addressing over buckets of four
// slots.
//
// Layout
//   A slot is 16 bytes, a bucket 64, aligned: what one access to the memory brings anyway.
//
//     slot: key (8) | entry (4) | overflow (4)
//
//   `entry` is 0 for an empty slot, kLocked while a key is being written, else row number + 1. So
//   zeroed memory is an empty index, and every int64 is a valid key. Tags, which the CPU's index
//   has, would be an access of their own here and save none: a bucket's four keys come with it.
//   Of the four `overflow` words of a bucket the first is used.
//
// Probing
//   The home of a key is bucket MurmurHash3(key) mod B, B a power of two. A probe looks at it, then
//   at its neighbour in the same 128-byte line, then goes on in pairs by an odd step of the key's
//   own; so it meets every bucket once, and keys with one home go different ways. Four lanes of a
//   warp, a cooperative group, look at the four slots of a bucket together, and a warp asks for the
//   home buckets of its 32 keys before it looks at the first answer: 2 KB in flight a warp. At load
//   0.75 nine keys in ten are in their home. The few that aren't are followed lane by lane.
//
// Where a probe may end
//   bucket.overflow counts the keys that went past this bucket because it was full when they came.
//   A probe ends at the first bucket whose count is zero. Erasing empties the slot and takes one
//   off the counts on the key's path: there are no tombstones, and a table that churns stays as
//   fast as a new one. (As key_index.h, and F14.)
//
// Threads
//   Kernels that only find, or erase, or insert run one after another. Within a kernel that
//   inserts, slots go from empty to locked to full, never back:
//     a key that is absent goes into the first slot on its path that isn't taken. An inserter looks
//     at the slots in that order. It compares taken ones, waits for locked ones, and claims an
//     empty one by compare-and-swap; so two inserters of a key come to the same slot, and the
//     second finds what the first wrote. Keys beyond an empty slot (after erasures) were found by
//     the probe that comes before: they were there when the kernel began.
//   Slots are read in one 16-byte access, so that key and entry are of one moment.
//   An inserter never waits for a lane of its own warp (InsertStep), so nothing deadlocks.
//
// Growth: the host makes a larger array and a kernel moves the slots; rows don't move.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_INDEX_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_INDEX_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "ops/common/murmur_hash3.h"
#include "ops/table/gpu/device/relaxed_read.cuh"

namespace gmeta {

namespace cg = cooperative_groups;

inline constexpr uint32_t kBucketSlots = 4;
inline constexpr uint32_t kNoEntry = 0;
inline constexpr uint32_t kLockedEntry = 0xffffffffu;
inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kFullWarp = 0xffffffffu;

struct alignas(16) KeySlot {
  int64_t key;
  uint32_t entry;
  uint32_t overflow;

  __device__ bool holds(int64_t wanted) const {
    return key == wanted && entry != kNoEntry && entry != kLockedEntry;
  }
};
static_assert(sizeof(KeySlot) == 16);

// One access, which other writers can't come between, and which sees what they wrote before.
__device__ inline KeySlot ReadSlotAtomic(const KeySlot* slot) {
  KeySlot read;
  uint64_t low, high;
  ReadRelaxed(slot, &low, &high);
  read.key = static_cast<int64_t>(low);
  read.entry = static_cast<uint32_t>(high);
  read.overflow = static_cast<uint32_t>(high >> 32);
  return read;
}

__device__ inline KeySlot ReadSlot(const KeySlot* slot) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(slot));
  return {static_cast<int64_t>(uint64_t{words.y} << 32 | words.x), words.z, words.w};
}

// The buckets that a key's probe meets.
class ProbePath {
 public:
  __device__ ProbePath(uint64_t hash, uint32_t bucket_mask)
      : home_(static_cast<uint32_t>(hash) & bucket_mask),
        mask_(bucket_mask),
        step_(static_cast<uint32_t>(hash >> 32) | 1) {}

  // The i-th, i < number of buckets.
  __device__ uint32_t operator[](uint32_t i) const {
    const uint32_t pair = ((home_ >> 1) + (i >> 1) * step_) & (mask_ >> 1);
    return pair << 1 | ((home_ ^ i) & 1);
  }

 private:
  uint32_t home_, mask_, step_;
};

// What kernels see of the index. At least two buckets, at most 2^30.
struct IndexView {
  KeySlot* slots;
  uint32_t bucket_mask;

  __device__ KeySlot* bucket(uint32_t number) const {
    return slots + uint64_t{number} * kBucketSlots;
  }
  __device__ ProbePath Path(int64_t key) const { return {MurmurHash3(key), bucket_mask}; }
  __device__ uint32_t* overflow(uint32_t number) const { return &bucket(number)->overflow; }

  // The slot of a key, probed by one thread from the i-th bucket of its path on; null where it is
  // absent. `at`, if given, becomes its bucket's place on the path.
  template <bool kAtomic>
  __device__ KeySlot* FindFrom(uint32_t i, int64_t key, const ProbePath& path,
                               uint32_t* entry = nullptr, uint32_t* at = nullptr) const {
    for (; i <= bucket_mask; ++i) {
      KeySlot* slot = bucket(path[i]);
      KeySlot read[kBucketSlots];
#pragma unroll
      for (uint32_t j = 0; j < kBucketSlots; ++j) {
        read[j] = kAtomic ? ReadSlotAtomic(slot + j) : ReadSlot(slot + j);
      }
#pragma unroll
      for (uint32_t j = 0; j < kBucketSlots; ++j) {
        if (!read[j].holds(key)) continue;
        if (entry != nullptr) *entry = read[j].entry;
        if (at != nullptr) *at = i;
        return slot + j;
      }
      if (read[0].overflow == 0) break;
    }
    return nullptr;
  }
};

// The entry of each lane's key, kNoEntry where it is absent or the lane isn't `active`. The whole
// warp calls it.
template <bool kAtomic>
__device__ inline uint32_t FindEntries(const IndexView& index, int64_t key, bool active) {
  const auto warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const auto tile = cg::tiled_partition<kBucketSlots>(warp);
  constexpr uint32_t kTiles = kWarp / kBucketSlots;
  const ProbePath path = index.Path(key);
  const uint32_t home = path[0];
  KeySlot slots[kBucketSlots];
  int64_t keys[kBucketSlots];
#pragma unroll
  for (uint32_t round = 0; round < kBucketSlots; ++round) {
    const uint32_t source = round * kTiles + tile.meta_group_rank();
    keys[round] = warp.shfl(key, source);
    const KeySlot* slot = index.bucket(warp.shfl(home, source)) + tile.thread_rank();
    slots[round] = kAtomic ? ReadSlotAtomic(slot) : ReadSlot(slot);
  }
  uint32_t entry = kNoEntry;
  bool beyond = false;
#pragma unroll
  for (uint32_t round = 0; round < kBucketSlots; ++round) {
    const uint32_t found = tile.ballot(slots[round].holds(keys[round]));
    const uint32_t overflow = tile.shfl(slots[round].overflow, 0);
    uint32_t held = tile.shfl(slots[round].entry, found == 0 ? 0 : __ffs(found) - 1);
    if (found == 0) held = kNoEntry;
    // From the tile that looked to the lane that asked.
    const uint32_t from = warp.thread_rank() % kTiles * kBucketSlots;
    const uint32_t answer = warp.shfl(held, from);
    const bool more = warp.shfl(overflow, from) != 0;
    if (warp.thread_rank() / kTiles == round) {
      entry = answer;
      beyond = more;
    }
  }
  if (!active) return kNoEntry;
  if (entry == kNoEntry && beyond) index.FindFrom<kAtomic>(1, key, path, &entry);
  return entry;
}

// One try to insert a key that FindEntries didn't find.
enum class InsertStep {
  kFound,    // another inserter was faster: *entry
  kClaimed,  // *claimed is locked: to be published
  kWait,     // a slot on the path is locked: try again
  kNoRoom,   // all slots are taken: the host hasn't grown the index in time
};

__device__ inline InsertStep TryInsert(const IndexView& index, int64_t key, uint32_t* entry,
                                       KeySlot** claimed) {
  const ProbePath path = index.Path(key);
  for (uint32_t i = 0; i <= index.bucket_mask; ++i) {
    KeySlot* slot = index.bucket(path[i]);
    for (uint32_t j = 0; j < kBucketSlots; ++j, ++slot) {
      KeySlot read = ReadSlotAtomic(slot);
      if (read.entry == kNoEntry) {
        const uint32_t before = atomicCAS(&slot->entry, kNoEntry, kLockedEntry);
        if (before == kNoEntry) {
          for (uint32_t passed = 0; passed < i; ++passed) {
            atomicAdd(index.overflow(path[passed]), 1u);
          }
          *claimed = slot;
          return InsertStep::kClaimed;
        }
        read = ReadSlotAtomic(slot);
      }
      if (read.entry == kLockedEntry) return InsertStep::kWait;
      if (read.key == key) {
        *entry = read.entry;
        return InsertStep::kFound;
      }
    }
  }
  return InsertStep::kNoRoom;
}

// Makes a claimed slot known, after all that others may read by it was written.
__device__ inline void Publish(KeySlot* slot, int64_t key, uint32_t entry) {
  *reinterpret_cast<volatile int64_t*>(&slot->key) = key;
  __threadfence();
  atomicExch(&slot->entry, entry);
}

// Empties the slot of a key. Returns its entry, to one caller alone of those that erase the key.
__device__ inline uint32_t Erase(const IndexView& index, int64_t key) {
  const ProbePath path = index.Path(key);
  uint32_t entry = kNoEntry, at = 0;
  KeySlot* slot = index.FindFrom<true>(0, key, path, &entry, &at);
  if (slot == nullptr || atomicCAS(&slot->entry, entry, kNoEntry) != entry) return kNoEntry;
  for (uint32_t i = 0; i < at; ++i) atomicSub(index.overflow(path[i]), 1u);
  return entry;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_INDEX_CUH_
