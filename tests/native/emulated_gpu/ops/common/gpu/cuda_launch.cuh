// In place of ops/common/gpu/cuda_launch.cuh: kernels run at once, on the CPU.

#ifndef GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_
#define GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "ops/common/gpu/cuda_error.cuh"

namespace gmeta {

template <class... Parameters, class... Arguments>
void Launch(void (*kernel)(Parameters...), unsigned blocks, int threads, int shared_bytes,
            cudaStream_t, const char* what, const Arguments&... arguments) {
  if (shared_bytes > static_cast<int>(emulated::kSharedBytes)) emulated::Fail(what);
  emulated::Launch(blocks, threads, [&] { kernel(arguments...); });
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_
