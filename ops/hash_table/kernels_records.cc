// The kernels of the dynamic hash table in host memory that take whole records.

#include "ops/hash_table/kernels_records.h"

#include "ops/hash_table/kernels_host.h"

namespace gmeta {

GMETA_REGISTER_RECORD_KERNELS(tensorflow::DEVICE_CPU, HostEngine);

}  // namespace gmeta
