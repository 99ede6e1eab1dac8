// GpuIndex: int64 key -> row number in device memory, by open addressing over buckets of four
// slots.
//
// Layout
//   A slot is 16 bytes, a bucket 64, aligned: a memory access fetches that much anyway.
//
//     slot: key (8) | entry (4) | overflow (4)
//
//   `entry` is 0 for an empty slot, kLocked while a key is being written, else row number + 1. So
//   zeroed memory is an empty index, and every int64 is a valid key. Tags, as in the CPU's index,
//   would need a memory access of their own here and save none: one access to a bucket already
//   fetches its four keys. A bucket uses only the first of its four `overflow` words.
//
// Probing
//   The home of a key is bucket MurmurHash3(key) mod B, B a power of two, of one part of the index
//   (Growth). A probe looks at it, then at its neighbour in the same 128-byte line, then at further
//   pairs, which are an odd step apart that depends on the key. So it visits every bucket once, and
//   keys with the same home take different paths. Four lanes of a warp, a cooperative group, look
//   at the four slots of a bucket together, and a warp loads the home buckets of its 32 keys before
//   it looks at the first of them: 2 KB in flight per warp. At load 0.75, nine keys in ten are in
//   their home. Single lanes probe on for the few other keys.
//
// Where a probe may end
//   bucket.overflow counts the keys that passed this bucket because it was full when they were
//   inserted. A probe ends at the first bucket whose count is zero. Erasing empties the slot and
//   subtracts one from the counts on the key's path: there are no tombstones, and a table with
//   many inserts and removals stays as fast as a new one. (Like key_index.h, and F14.)
//
// Threads
//   Kernels that only find, or erase, or insert run one after another. Within a kernel that
//   inserts, slots change from empty to locked to full, never back:
//     an absent key is put into the first slot on its path that isn't taken. An inserter looks at
//     the slots in that order. It compares taken ones, waits for locked ones, and claims an empty
//     one by compare-and-swap; so two inserters of a key reach the same slot, and the second finds
//     the entry that the first wrote. A key may be beyond an empty slot (after erasures). The probe
//     before the insertion has found such a key, because it was in the table when the kernel began.
//   Slots are read in one 16-byte access, so that key and entry are from the same moment.
//   An inserter never waits for a lane of its own warp (InsertStep), so nothing deadlocks.
//
// Growth
//   The index is cut into parts, up to kMostParts, so that growth moves few keys at a time
//   (gpu_index.cuh). A directory gives the part of each value of some bits of the hash, which are
//   neither those of the home nor those of the step. Several entries may give the same part. The
//   host makes new parts, and a kernel moves the slots of an old one; rows don't move. The number
//   of keys of each part is counted.

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

// Reads a slot in one access, which other writers can't interrupt, and which sees their earlier
// writes.
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

// Which bits of a hash choose the part, and which the step of the probe.
inline constexpr int kPartShift = 32;
inline constexpr int kLog2MostParts = 10;
inline constexpr uint32_t kMostParts = uint32_t{1} << kLog2MostParts;

// The buckets of a part that a key's probe visits.
class ProbePath {
 public:
  __device__ ProbePath(uint64_t hash, uint32_t bucket_mask)
      : home_(static_cast<uint32_t>(hash) & bucket_mask),
        mask_(bucket_mask),
        step_(static_cast<uint32_t>(hash >> (kPartShift + kLog2MostParts)) | 1) {}

  // The i-th, i < number of buckets.
  __device__ uint32_t operator[](uint32_t i) const {
    const uint32_t pair = ((home_ >> 1) + (i >> 1) * step_) & (mask_ >> 1);
    return pair << 1 | ((home_ ^ i) & 1);
  }

 private:
  uint32_t home_, mask_, step_;
};

// A part of the index. It has at least two buckets, at most 2^30.
struct alignas(16) IndexPart {
  KeySlot* slots;
  uint32_t bucket_mask;
  uint32_t number;

  __device__ KeySlot* bucket(uint32_t at) const { return slots + uint64_t{at} * kBucketSlots; }
  __device__ uint32_t* overflow(uint32_t at) const { return &bucket(at)->overflow; }

  // Returns the slot of a key, or null if it is absent. One thread probes from the i-th bucket of
  // the key's path on. Sets `at`, if given, to the place of the key's bucket on the path.
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
static_assert(sizeof(IndexPart) == 16);

// The index, as kernels see it.
struct IndexView {
  const IndexPart* parts;  // the directory
  uint32_t part_mask;
  unsigned int* part_keys;  // how many keys each part has, by its number
  uint64_t longest;         // the slots of the largest part
  // The keys of each of 2^log2_shards shards (policies.h); null if nobody reads their number, or if
  // keys only move.
  unsigned int* shard_keys = nullptr;
  int log2_shards = 0;

  __device__ IndexPart PartOf(uint64_t hash) const {
    const uint32_t at = static_cast<uint32_t>(hash >> kPartShift) & part_mask;
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(parts + at));
    return {reinterpret_cast<KeySlot*>(uint64_t{words.y} << 32 | words.x), words.z, words.w};
  }
  // Returns the slot of a key, or null if it is absent.
  __device__ KeySlot* SlotOf(int64_t key, uint32_t* entry = nullptr) const {
    const uint64_t hash = MurmurHash3(key);
    const IndexPart part = PartOf(hash);
    return part.FindFrom<true>(0, key, ProbePath(hash, part.bucket_mask), entry);
  }
  // Goes around all slots in blocks of `size`, a power of two that divides every part. Returns
  // block number `at` of NumberOfBlocks, or null: each block comes once.
  __device__ uint64_t NumberOfBlocks(uint32_t size) const {
    return (uint64_t{part_mask} + 1) * (longest / size);
  }
  __device__ const KeySlot* Block(uint64_t at, uint32_t size) const {
    const uint32_t entry = static_cast<uint32_t>(at) & part_mask;
    const IndexPart& part = parts[entry];
    const uint64_t slots = (uint64_t{part.bucket_mask} + 1) * kBucketSlots;
    const uint64_t first = at / (uint64_t{part_mask} + 1) * size;
    return first < slots && IsFirst(entry) ? part.slots + first : nullptr;
  }
  // Whether no smaller entry of the directory gives the same part. Those that give it have the same
  // lower bits.
  __device__ bool IsFirst(uint32_t entry) const {
    for (uint32_t mask = part_mask; mask != 0; mask >>= 1) {
      const uint32_t lower = entry & mask >> 1;
      if (lower != entry && parts[lower].number == parts[entry].number) return false;
    }
    return true;
  }
  // Counts the keys that a warp's `changed` lanes have inserted (`change` is 1) or erased (-1). The
  // whole warp calls it.
  __device__ void Count(bool changed, int64_t key, int change) const {
    const uint64_t hash = MurmurHash3(key);
    Count(changed, PartOf(hash).number, change, part_keys);
    if (shard_keys == nullptr) return;
    Count(changed, static_cast<uint32_t>(hash >> 1 >> (63 - log2_shards)), change, shard_keys);
  }

 private:
  // One lane counts for all lanes of the same counter.
  __device__ static void Count(bool changed, uint32_t which, int change, unsigned int* counters) {
    const uint32_t peers = __match_any_sync(kFullWarp, changed ? which : UINT32_MAX);
    if (changed && threadIdx.x % kWarp == static_cast<uint32_t>(__ffs(peers) - 1)) {
      atomicAdd(counters + which, static_cast<unsigned int>(change * __popc(peers)));
    }
  }
};

// Returns the entry of each lane's key, or kNoEntry if it is absent or the lane isn't `active`. The
// whole warp calls it.
template <bool kAtomic>
__device__ inline uint32_t FindEntries(const IndexView& index, int64_t key, bool active) {
  const auto warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const auto tile = cg::tiled_partition<kBucketSlots>(warp);
  constexpr uint32_t kTiles = kWarp / kBucketSlots;
  const uint64_t hash = MurmurHash3(key);
  const IndexPart part = index.PartOf(hash);
  const ProbePath path(hash, part.bucket_mask);
  const KeySlot* const home = part.bucket(path[0]);
  KeySlot slots[kBucketSlots];
  int64_t keys[kBucketSlots];
#pragma unroll
  for (uint32_t round = 0; round < kBucketSlots; ++round) {
    const uint32_t source = round * kTiles + tile.meta_group_rank();
    keys[round] = warp.shfl(key, source);
    const KeySlot* slot = warp.shfl(home, source) + tile.thread_rank();
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
    // Passes the result from the tile that read the bucket to the lane that has the key.
    const uint32_t from = warp.thread_rank() % kTiles * kBucketSlots;
    const uint32_t answer = warp.shfl(held, from);
    const bool more = warp.shfl(overflow, from) != 0;
    if (warp.thread_rank() / kTiles == round) {
      entry = answer;
      beyond = more;
    }
  }
  if (!active) return kNoEntry;
  if (entry == kNoEntry && beyond) part.FindFrom<kAtomic>(1, key, path, &entry);
  return entry;
}

// The result of one try to insert a key that FindEntries didn't find.
enum class InsertStep {
  kFound,    // another inserter was faster and made *entry
  kClaimed,  // *claimed is locked, and the caller has to publish it
  kWait,     // a slot on the path is locked: try again
  kNoRoom,   // all slots of the part are taken: the host hasn't grown it in time
};

__device__ inline InsertStep TryInsert(const IndexView& index, int64_t key, uint32_t* entry,
                                       KeySlot** claimed) {
  const uint64_t hash = MurmurHash3(key);
  const IndexPart part = index.PartOf(hash);
  const ProbePath path(hash, part.bucket_mask);
  for (uint32_t i = 0; i <= part.bucket_mask; ++i) {
    KeySlot* slot = part.bucket(path[i]);
    for (uint32_t j = 0; j < kBucketSlots; ++j, ++slot) {
      KeySlot read = ReadSlotAtomic(slot);
      if (read.entry == kNoEntry) {
        const uint32_t before = atomicCAS(&slot->entry, kNoEntry, kLockedEntry);
        if (before == kNoEntry) {
          for (uint32_t passed = 0; passed < i; ++passed) {
            atomicAdd(part.overflow(path[passed]), 1u);
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

// Makes a claimed slot visible to others. The caller has written everything that others may reach
// through it.
__device__ inline void Publish(KeySlot* slot, int64_t key, uint32_t entry) {
  *reinterpret_cast<volatile int64_t*>(&slot->key) = key;
  __threadfence();
  atomicExch(&slot->entry, entry);
}

// Empties the slots of the keys of a warp's `active` lanes, and returns each lane's entry. If
// several threads erase a key, only one of them gets its entry, the others kNoEntry. The whole warp
// calls it.
__device__ inline uint32_t Erase(const IndexView& index, int64_t key, bool active) {
  uint32_t entry = kNoEntry;
  if (active) {
    const uint64_t hash = MurmurHash3(key);
    const IndexPart part = index.PartOf(hash);
    const ProbePath path(hash, part.bucket_mask);
    uint32_t at = 0;
    KeySlot* slot = part.FindFrom<true>(0, key, path, &entry, &at);
    if (slot == nullptr || atomicCAS(&slot->entry, entry, kNoEntry) != entry) {
      entry = kNoEntry;
    } else {
      for (uint32_t i = 0; i < at; ++i) atomicSub(part.overflow(path[i]), 1u);
    }
  }
  index.Count(entry != kNoEntry, key, -1);
  return entry;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_INDEX_CUH_
