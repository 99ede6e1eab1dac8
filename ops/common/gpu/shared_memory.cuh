// The dynamic shared memory of a launch, whose size it gives (cuda_launch.cuh).

#ifndef GMETA_OPS_COMMON_GPU_SHARED_MEMORY_CUH_
#define GMETA_OPS_COMMON_GPU_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

namespace gmeta {

__device__ __forceinline__ char* DynamicShared() {
  extern __shared__ __align__(16) char dynamic_shared[];
  return dynamic_shared;
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_GPU_SHARED_MEMORY_CUH_
