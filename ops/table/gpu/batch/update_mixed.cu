// Updates of tables of two precisions.

#include "ops/table/gpu/batch/launch_update.cuh"

namespace gmeta {

template void LaunchUpdate(const UpdateBatch<MixedRowsView>&, const SparseOptimizer&, float,
                           int64_t, bool, cudaStream_t);

}  // namespace gmeta
