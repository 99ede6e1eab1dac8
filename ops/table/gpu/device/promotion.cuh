// The kernel that moves half rows to full ones when they have been used often enough
// (mixed_rows.cuh).

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_PROMOTION_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_PROMOTION_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

// Promotes the rows of the first counters->rare_no_more keys; no key occurs twice. Skips keys that
// the table doesn't have any more and rows that needn't be moved any more, because the list may
// have waited for memory. `vectors` is the number of vectors in a whole record.
template <class Vec>
__global__ void __launch_bounds__(kBlockThreads)
    PromoteRows(IndexView index, MixedRowsView rows, const int64_t* keys, uint32_t vectors) {
  const uint32_t total = rows.counters->rare_no_more;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t weights = rows.dim / kVecFloats<Vec>;
  for (uint32_t base = blockIdx.x * kBlockThreads + threadIdx.x - lane; base < total;
       base += gridDim.x * kBlockThreads) {
    const bool active = base + lane < total;
    const int64_t key = active ? keys[base + lane] : 0;
    const uint32_t entry = FindEntries<true>(index, key, active);
    RowHeader header{};
    bool moves = entry != kNoEntry && HalfRule::IsHalf(entry - 1);
    if (moves) header = *rows.header(entry - 1);
    moves = moves && !rows.rule.IsRare(header.frequency);
    const uint32_t moved = MoveRows(index, rows, key, moves, entry - 1, header.frequency);
    MixedRecord from, to;
    if (moves) {
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

// Queues the kernel, for at most `most` keys. If `vector` is true, a vector has four floats, else
// one.
void LaunchPromote(const IndexView& index, const MixedRowsView& rows, const int64_t* keys,
                   uint32_t most, bool vector, cudaStream_t stream);

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_PROMOTION_CUH_
