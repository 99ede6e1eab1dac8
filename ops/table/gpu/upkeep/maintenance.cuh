// The kernels that find, remove and select rows of a GPU table.

#ifndef GMETA_OPS_TABLE_GPU_UPKEEP_MAINTENANCE_CUH_
#define GMETA_OPS_TABLE_GPU_UPKEEP_MAINTENANCE_CUH_

#include <cstdint>

#include "ops/table/core/logical_shards.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/table.cuh"

namespace gmeta {

__global__ void __launch_bounds__(kBlockThreads)
    ContainsKeys(IndexView index, const int64_t* keys, uint32_t n, uint8_t* found) {
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const bool active = at < n;
  const uint32_t entry = FindEntries<false>(index, active ? keys[at] : 0, active);
  if (active) found[at] = entry != kNoEntry;
}

// Removes keys. If `erased` is given, erased[i] becomes whether this occurrence of the key removed
// it.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    EraseKeys(IndexView index, Rows rows, const int64_t* keys, uint32_t n, uint8_t* erased,
              unsigned long long* counter) {
  __shared__ uint32_t shared[1];
  const BlockCount removes(shared);
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const int64_t key = at < n ? keys[at] : 0;
  const uint32_t entry = Erase(index, key, at < n);
  rows.Give(entry != kNoEntry, key, entry - 1);
  if (at < n && erased != nullptr) erased[at] = entry != kNoEntry;
  removes.Add(entry != kNoEntry);
  __syncthreads();
  if (threadIdx.x == 0 && removes.sum() != 0) {
    atomicAdd(counter, static_cast<unsigned long long>(removes.sum()));
  }
}

// Writes the keys and row numbers of the rows that a scan finds in a part, in any order. Counts the
// rows of each logical shard: all rows in `live`, and the rows found in `found`. counters->selected
// counts all rows found.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    SelectRows(const KeySlot* slots, uint64_t count, Rows rows, Scan scan, int64_t* keys,
               uint32_t* numbers, uint32_t* live, uint32_t* found) {
  const uint64_t at = GlobalThread();
  const uint32_t lane = threadIdx.x % kWarp;
  bool selected = false;
  KeySlot slot{};
  if (at < count) slot = ReadSlot(slots + at);
  if (slot.entry != kNoEntry) {
    const uint64_t hash = MurmurHash3(slot.key);
    const uint32_t logical = LogicalShard(hash);
    if (scan.range.contains(logical) &&
        (scan.shards >> (hash >> 1 >> (63 - scan.log2_shards)) & 1) != 0) {
      if (live != nullptr) atomicAdd(live + logical, 1u);
      selected =
          scan.min_last_step == 0 || rows.header(slot.entry - 1)->last_step >= scan.min_last_step;
      if (selected && found != nullptr) atomicAdd(found + logical, 1u);
    }
  }
  const uint32_t mask = __ballot_sync(kFullWarp, selected);
  if (mask == 0) return;
  uint32_t place = 0;
  if (lane == 0) place = atomicAdd(&rows.counters->selected, __popc(mask));
  place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
  if (selected && keys != nullptr) {
    keys[place] = slot.key;
    numbers[place] = slot.entry - 1;
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_UPKEEP_MAINTENANCE_CUH_
