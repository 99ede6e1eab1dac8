// The kernels that save and load the records of a GPU table.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_RECORDS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_RECORDS_CUH_

#include <cstdint>

#include "ops/table/core/logical_shards.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/read_records.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

// Sets logical[i] to the logical shard of keys[i], and order[i] to i.
__global__ void __launch_bounds__(kBlockThreads)
    NumberByShard(const int64_t* keys, uint32_t n, uint16_t* logical, uint32_t* order) {
  const uint64_t at = GlobalThread();
  if (at >= n) return;
  logical[at] = static_cast<uint16_t>(LogicalShard(MurmurHash3(keys[at])));
  order[at] = static_cast<uint32_t>(at);
}

__global__ void __launch_bounds__(kBlockThreads)
    Permute(const int64_t* keys, const uint32_t* numbers, const uint32_t* order, uint32_t n,
            int64_t* ordered_keys, uint32_t* ordered_numbers) {
  const uint64_t at = GlobalThread();
  if (at >= n) return;
  ordered_keys[at] = keys[order[at]];
  ordered_numbers[at] = numbers[order[at]];
}

// Writes records of distinct keys, and makes rows for absent keys. Each row gets the form that it
// is to have at a step of the table.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    WriteRecords(IndexView index, Rows rows, const int64_t* keys, uint32_t n, PieceColumns from,
                 uint32_t step) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const bool active = at < n;
  const int64_t key = active ? keys[at] : 0;
  RowHeader header{};
  if (active) {
    header = {static_cast<uint32_t>(from.frequency[at]), static_cast<uint32_t>(from.last_step[at])};
  }
  uint32_t entry = FindEntries<true>(index, key, active);
  bool won = false;
  const uint32_t inserted =
      InsertKeys(index, rows, key, active && entry == kNoEntry, header, step, &won);
  if constexpr (Rows::kMixed) {
    const bool moves =
        entry != kNoEntry && HalfRule::IsHalf(entry - 1) != rows.IsToBeHalf(key, header, step);
    entry = MoveRows(index, rows, key, moves, entry - 1) + 1;
  }
  if (entry == kNoEntry) entry = inserted;
  if (entry != kNoEntry && !won) *rows.header(entry - 1) = header;
  for (uint32_t i = 0; i < kWarp; ++i) {
    const uint32_t its_entry = __shfl_sync(kFullWarp, entry, i);
    if (its_entry == kNoEntry) continue;
    const size_t position = at - lane + i;
    const auto record = rows.record(its_entry - 1);
    for (uint32_t c = lane; c < rows.dim; c += kWarp) {
      record.StoreWeights(c, from.rows[position * rows.dim + c]);
    }
    for (uint32_t c = lane; c < rows.slot_floats; c += kWarp) {
      record.StoreSlots(rows.dim + c, from.slots[position * rows.slot_floats + c]);
    }
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_RECORDS_CUH_
