#include <variant>

#include "ops/common/cuda_error.cuh"
#include "ops/gpu_table/update.cuh"

namespace gmeta {

void LaunchUpdate(const UpdateBatch& batch, const SparseOptimizer& optimizer, float learning_rate,
                  int64_t step, bool vector, cudaStream_t stream) {
  if (batch.n == 0) return;
  const uint32_t blocks = (batch.n + kBlockThreads - 1) / kBlockThreads;
  std::visit(
      [&](const auto& policy) {
        using Optimizer = std::decay_t<decltype(policy)>;
        const auto begun = policy.Begin(learning_rate, step);
        const auto kernel = vector ? (batch.summed ? UpdateRows<Optimizer, float4, true>
                                                   : UpdateRows<Optimizer, float4, false>)
                                   : (batch.summed ? UpdateRows<Optimizer, float, true>
                                                   : UpdateRows<Optimizer, float, false>);
        kernel<<<blocks, kBlockThreads, 0, stream>>>(batch, begun);
      },
      optimizer);
  CheckLaunch("updating rows");
}

}  // namespace gmeta
