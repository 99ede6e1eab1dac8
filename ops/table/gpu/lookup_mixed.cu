// Lookups in tables of two precisions, and the promotion of rows after them.

#include <algorithm>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/promotion.cuh"
#include "ops/table/gpu/launch_lookup.cuh"

namespace gmeta {

template void LaunchFind(const LookupBatch<MixedRowsView>&, bool, Uses, cudaStream_t);
template void LaunchInsert(const LookupBatch<MixedRowsView>&, bool, const uint8_t*, bool,
                           cudaStream_t);

void LaunchPromote(const IndexView& index, const MixedRowsView& rows, const int64_t* keys,
                   uint32_t most, bool vector, cudaStream_t stream) {
  if (most == 0) return;
  const uint32_t blocks = std::min(BlocksOf(most), kMostInsertBlocks);
  const auto kernel = vector ? PromoteRows<float4> : PromoteRows<float>;
  const uint32_t numbers = vector ? rows.stride / 4 : rows.stride;
  Launch(kernel, blocks, kBlockThreads, 0, stream, "promoting rows", index, rows, keys, numbers);
}

}  // namespace gmeta
