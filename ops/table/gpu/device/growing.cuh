// The kernel that grows the index of a GPU table.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_GROWING_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_GROWING_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"

namespace gmeta {

// Moves the slots of one array into another, larger, empty one.
__global__ void Rehash(const KeySlot* from, uint64_t count, IndexView to) {
  const uint64_t at = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const KeySlot slot = ReadSlot(from + at);
  if (slot.entry == kNoEntry) return;
  const ProbePath path = to.Path(slot.key);
  for (uint32_t i = 0; i <= to.bucket_mask; ++i) {
    KeySlot* bucket = to.bucket(path[i]);
    for (uint32_t j = 0; j < kBucketSlots; ++j) {
      if (bucket[j].entry != kNoEntry) continue;
      if (atomicCAS(&bucket[j].entry, kNoEntry, slot.entry) != kNoEntry) continue;
      bucket[j].key = slot.key;
      for (uint32_t passed = 0; passed < i; ++passed) atomicAdd(to.overflow(path[passed]), 1u);
      return;
    }
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_GROWING_CUH_
