// Starts a kernel, and names it in the error if that fails.

#ifndef GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_
#define GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "ops/common/gpu/cuda_error.cuh"

namespace gmeta {

// Launches a grid of `blocks` blocks. `shared_bytes` of dynamic shared memory may exceed the 48 KiB
// that a kernel gets by default.
template <class... Parameters, class... Arguments>
void Launch(void (*kernel)(Parameters...), unsigned blocks, int threads, int shared_bytes,
            cudaStream_t stream, const char* what, const Arguments&... arguments) {
  if (shared_bytes > 48 * 1024) {
    CheckCuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        what);
  }
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
  CheckLaunch(what);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_
