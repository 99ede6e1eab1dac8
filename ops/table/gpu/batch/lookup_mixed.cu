// Lookups in tables of two precisions, and the kernels that move rows to their other form.

#include <algorithm>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/batch/launch_lookup.cuh"
#include "ops/table/gpu/device/forms.cuh"

namespace gmeta {

template void LaunchFind(const LookupBatch<MixedRowsView>&, bool, Uses, cudaStream_t);
template void LaunchInsert(const LookupBatch<MixedRowsView>&, bool, const uint8_t*, bool,
                           cudaStream_t);

void LaunchListCold(const KeySlot* slots, uint64_t count, const MixedRowsView& rows,
                    uint64_t shards, uint32_t step, int64_t* list, uint32_t most,
                    cudaStream_t stream) {
  Launch(ListCold<MixedRowsView>, BlocksOf(count), kBlockThreads, 0, stream, "finding cold rows",
         slots, count, rows, shards, step, list, most);
}

void LaunchMoveMisfits(const IndexView& index, const MixedRowsView& rows, const int64_t* keys,
                       const unsigned int* count, uint32_t most, bool from_half, uint32_t step,
                       bool vector, cudaStream_t stream) {
  if (most == 0) return;
  const uint32_t blocks = std::min(BlocksOf(most), kMostInsertBlocks);
  const auto kernel = vector ? MoveMisfits<float4> : MoveMisfits<float>;
  const uint32_t numbers = vector ? rows.stride / 4 : rows.stride;
  Launch(kernel, blocks, kBlockThreads, 0, stream, "moving rows to their form", index, rows, keys,
         count, from_half, step, numbers);
}

}  // namespace gmeta
