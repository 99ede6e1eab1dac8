// In place of ops/common/gpu/shared_memory.cuh.

#ifndef GMETA_OPS_COMMON_GPU_SHARED_MEMORY_CUH_
#define GMETA_OPS_COMMON_GPU_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

namespace gmeta {

inline char* DynamicShared() { return emulated::shared_memory; }

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_GPU_SHARED_MEMORY_CUH_
