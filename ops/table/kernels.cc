// The kernels of the dynamic hash table in host memory that take batches; the kernels that take
// whole records are in kernels_records.cc.

#include "ops/table/kernels_batch.h"
#include "ops/table/kernels_host.h"

namespace gmeta {

GMETA_REGISTER_BATCH_KERNELS(tensorflow::DEVICE_CPU, HostEngine);

}  // namespace gmeta
