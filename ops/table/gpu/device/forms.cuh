// The kernels that move rows of a table of two precisions from one form to the other
// (mixed_rows.cuh): half rows that have been used often enough, and full rows that have cooled
// down.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_FORMS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_FORMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

// Lists the keys of the full rows in `count` slots of the index, in a set of shards (one bit per
// shard), that are to be half at a step of the table. counters->cold counts them all; the list
// takes `most`.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    ListCold(const KeySlot* slots, uint64_t count, Rows rows, uint64_t shards, uint32_t step,
             int64_t* list, uint32_t most) {
  const uint64_t at = GlobalThread();
  KeySlot slot{};
  if (at < count) slot = ReadSlot(slots + at);
  bool cold = slot.entry != kNoEntry && !HalfRule::IsHalf(slot.entry - 1) &&
              (shards >> rows.ShardOf(slot.key) & 1) != 0;
  if (cold) cold = rows.IsToBeHalf(slot.key, *rows.header(slot.entry - 1), step);
  ListKeys(slot.key, cold, list, &rows.counters->cold, most);
}

// Moves those rows of the first *count keys that are of one form (`from_half` or not) and are to be
// of the other at a step of the table. A key may occur twice. Skips keys that the table no longer
// has and rows that no longer need to move, because the list may have waited for memory. `vectors`
// is the number of vectors in a whole record.
template <class Vec>
__global__ void __launch_bounds__(kBlockThreads)
    MoveMisfits(IndexView index, MixedRowsView rows, const int64_t* keys, const unsigned int* count,
                bool from_half, uint32_t step, uint32_t vectors) {
  const uint32_t total = *count;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t weights = rows.dim / kVecFloats<Vec>;
  for (uint32_t base = blockIdx.x * kBlockThreads + threadIdx.x - lane; base < total;
       base += gridDim.x * kBlockThreads) {
    const bool active = base + lane < total;
    const int64_t key = active ? keys[base + lane] : 0;
    const uint32_t entry = FindEntries<true>(index, key, active);
    RowHeader header{};
    if (entry != kNoEntry) header = *rows.header(entry - 1);
    const bool misfits = entry != kNoEntry && HalfRule::IsHalf(entry - 1) == from_half &&
                         rows.IsToBeHalf(key, header, step) != from_half;
    const uint32_t moved = MoveRows(index, rows, key, misfits, entry - 1);
    MixedRecord from, to;
    if (misfits && moved != entry - 1) {
      *rows.header(moved) = header;
      from = rows.record(entry - 1);
      to = rows.record(moved);
    }
    for (uint32_t i = 0; i < kWarp; ++i) {
      const MixedRecord its_from = from.OfLane(i), its_to = to.OfLane(i);
      if (!its_from) continue;
      for (uint32_t c = lane; c < vectors; c += kWarp) {
        const Vec loaded = its_from.template Load<Vec>(c);
        if (c < weights) {
          its_to.StoreWeights(c, its_from.Weights(loaded));
        } else {
          its_to.StoreSlots(c, its_from.Slots(loaded));
        }
      }
    }
  }
}

// Queue the kernels. A list has at most `most` keys. If `vector` is true, a vector has four floats,
// else one.
void LaunchListCold(const KeySlot* slots, uint64_t count, const MixedRowsView& rows,
                    uint64_t shards, uint32_t step, int64_t* list, uint32_t most,
                    cudaStream_t stream);
void LaunchMoveMisfits(const IndexView& index, const MixedRowsView& rows, const int64_t* keys,
                       const unsigned int* count, uint32_t most, bool from_half, uint32_t step,
                       bool vector, cudaStream_t stream);

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_FORMS_CUH_
