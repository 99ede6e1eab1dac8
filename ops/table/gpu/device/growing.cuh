// The kernel that grows the index of a GPU table.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_GROWING_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_GROWING_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"

namespace gmeta {

// Puts a slot's key and entry into the first free slot on the key's path. No thread looks for the
// key meanwhile.
__device__ inline void PutSlot(const IndexView& index, const KeySlot& slot) {
  const uint64_t hash = MurmurHash3(slot.key);
  const IndexPart part = index.PartOf(hash);
  const ProbePath path(hash, part.bucket_mask);
  for (uint32_t i = 0; i <= part.bucket_mask; ++i) {
    KeySlot* bucket = part.bucket(path[i]);
    for (uint32_t j = 0; j < kBucketSlots; ++j) {
      if (bucket[j].entry != kNoEntry) continue;
      if (atomicCAS(&bucket[j].entry, kNoEntry, slot.entry) != kNoEntry) continue;
      bucket[j].key = slot.key;
      for (uint32_t passed = 0; passed < i; ++passed) atomicAdd(part.overflow(path[passed]), 1u);
      return;
    }
  }
}

// Moves the slots of an array that was a part to the empty parts that have taken its place.
__global__ void Rehash(const KeySlot* from, uint64_t count, IndexView to) {
  const uint64_t at = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  KeySlot slot{};
  if (at < count) slot = ReadSlot(from + at);
  const bool moves = slot.entry != kNoEntry;
  if (moves) PutSlot(to, slot);
  to.Count(moves, slot.key, 1);
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_GROWING_CUH_
