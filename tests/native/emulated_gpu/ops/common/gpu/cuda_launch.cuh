// In place of ops/common/gpu/cuda_launch.cuh: kernels run on the CPU, at once or when their
// stream does (cuda_runtime.h).

#ifndef GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_
#define GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "ops/common/gpu/cuda_error.cuh"

namespace gmeta {

template <class... Parameters, class... Arguments>
void Launch(void (*kernel)(Parameters...), unsigned blocks, int threads, int shared_bytes,
            cudaStream_t stream, const char* what, const Arguments&... arguments) {
  if (shared_bytes > static_cast<int>(emulated::kSharedBytes)) emulated::Fail(what);
  const auto run = [=] { emulated::Launch(blocks, threads, [&] { kernel(arguments...); }); };
  stream == nullptr ? run() : stream->waiting.push_back(run);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_GPU_CUDA_LAUNCH_CUH_
