// Lookups in tables of float32 rows.

#include "ops/table/gpu/batch/launch_lookup.cuh"

namespace gmeta {

template void LaunchFind(const LookupBatch<RowsView>&, bool, Uses, cudaStream_t);
template void LaunchInsert(const LookupBatch<RowsView>&, bool, const uint8_t*, bool, cudaStream_t);

}  // namespace gmeta
