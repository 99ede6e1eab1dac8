// Updates of tables of float32 rows.

#include "ops/table/gpu/batch/launch_update.cuh"

namespace gmeta {

template void LaunchUpdate(const UpdateBatch<RowsView>&, const SparseOptimizer&, float, int64_t,
                           bool, cudaStream_t);

}  // namespace gmeta
