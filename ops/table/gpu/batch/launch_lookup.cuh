// Chooses and launches a lookup's kernels. A source that includes this file compiles them for one
// view of the rows, so that the kernels for one form of rows and for two are compiled in parallel.

#ifndef GMETA_OPS_TABLE_GPU_BATCH_LAUNCH_LOOKUP_CUH_
#define GMETA_OPS_TABLE_GPU_BATCH_LAUNCH_LOOKUP_CUH_

#include <algorithm>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/lookup.cuh"

namespace gmeta {

inline constexpr uint32_t kMostInsertBlocks = 1024;

template <class Vec, int kLog2Lanes, class Rows>
void LaunchFindOf(const LookupBatch<Rows>& batch, Uses uses, cudaStream_t stream) {
  const auto kernel = uses == Uses::kNone       ? FindRows<Rows, Vec, kLog2Lanes, Uses::kNone>
                      : uses == Uses::kDistinct ? FindRows<Rows, Vec, kLog2Lanes, Uses::kDistinct>
                                                : FindRows<Rows, Vec, kLog2Lanes, Uses::kShared>;
  Launch(kernel, BlocksOf(batch.n), kBlockThreads, 0, stream, "looking rows up", batch);
}

template <class Rows>
void LaunchFind(const LookupBatch<Rows>& batch, bool vector, Uses uses, cudaStream_t stream) {
  const int log2 = Log2Lanes(batch.vectors);
  if (!vector) {
    return log2 <= 3 ? LaunchFindOf<float, 3>(batch, uses, stream)
                     : LaunchFindOf<float, 5>(batch, uses, stream);
  }
  switch (log2) {
    case 0:
      return LaunchFindOf<float4, 0>(batch, uses, stream);
    case 1:
      return LaunchFindOf<float4, 1>(batch, uses, stream);
    case 2:
      return LaunchFindOf<float4, 2>(batch, uses, stream);
    case 3:
      return LaunchFindOf<float4, 3>(batch, uses, stream);
    case 4:
      return LaunchFindOf<float4, 4>(batch, uses, stream);
    default:
      return LaunchFindOf<float4, 5>(batch, uses, stream);
  }
}

template <class Rows>
void LaunchInsert(const LookupBatch<Rows>& batch, bool vector, const uint8_t* admitted,
                  bool distinct, cudaStream_t stream) {
  const uint32_t blocks = std::min(BlocksOf(batch.n), kMostInsertBlocks);
  const auto kernel = vector ? InsertRows<Rows, float4> : InsertRows<Rows, float>;
  Launch(kernel, blocks, kBlockThreads, 0, stream, "inserting rows", batch, admitted, distinct);
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_BATCH_LAUNCH_LOOKUP_CUH_
