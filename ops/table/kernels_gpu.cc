// The kernels of the dynamic hash table on a GPU.

#include "ops/table/kernels_gpu.h"

#include "ops/table/kernels_batch.h"
#include "ops/table/kernels_records.h"

namespace gmeta {

GMETA_REGISTER_BATCH_KERNELS(tensorflow::DEVICE_GPU, GpuEngine);
GMETA_REGISTER_RECORD_KERNELS(tensorflow::DEVICE_GPU, GpuEngine);

}  // namespace gmeta
