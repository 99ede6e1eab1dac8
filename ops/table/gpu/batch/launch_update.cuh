// Chooses and launches an update's kernel. A source that includes this file compiles the kernel for
// one view of the rows (like launch_lookup.cuh).

#ifndef GMETA_OPS_TABLE_GPU_BATCH_LAUNCH_UPDATE_CUH_
#define GMETA_OPS_TABLE_GPU_BATCH_LAUNCH_UPDATE_CUH_

#include <variant>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/update.cuh"

namespace gmeta {

template <class Rows>
void LaunchUpdate(const UpdateBatch<Rows>& batch, const SparseOptimizer& optimizer,
                  float learning_rate, int64_t step, bool vector, cudaStream_t stream) {
  if (batch.n == 0) return;
  std::visit(
      [&](const auto& policy) {
        using Optimizer = std::decay_t<decltype(policy)>;
        const auto begun = policy.Begin(learning_rate, step);
        const auto kernel = vector ? (batch.summed ? UpdateRows<Rows, Optimizer, float4, true>
                                                   : UpdateRows<Rows, Optimizer, float4, false>)
                                   : (batch.summed ? UpdateRows<Rows, Optimizer, float, true>
                                                   : UpdateRows<Rows, Optimizer, float, false>);
        Launch(kernel, BlocksOf(batch.n), kBlockThreads, 0, stream, "updating rows", batch, begun);
      },
      optimizer);
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_BATCH_LAUNCH_UPDATE_CUH_
