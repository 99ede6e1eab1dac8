// What the launches of HSTU's attention share: checks, tensor maps, the choice of a kernel.

#ifndef GMETA_OPS_HSTU_ATTENTION_GPU_LAUNCH_CUH_
#define GMETA_OPS_HSTU_ATTENTION_GPU_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/common/cuda_error.cuh"
#include "ops/common/cuda_launch.cuh"
#include "ops/hstu_attention/hstu_attention_abi.h"
#include "ops/hstu_attention/strips.cuh"
#include "ops/hstu_attention/tensor_map.cuh"

namespace gmeta::hstu {

// Of the current device.
inline int Property(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

template <class T>
bool MapOf(CUtensorMap* map, const GmetaHstuAttention& a, const GmetaHeads& x, int rows) {
  return hopper::MakeTensorMap<T>(map, x.data, a.tokens, a.heads, a.width, x.stride, a.width, rows);
}

inline void CheckSupported(int32_t dtype, int32_t width) {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw CudaError(GMETA_CUDA_UNSUPPORTED, message);
  };
  require(dtype == GMETA_BFLOAT16 || dtype == GMETA_FLOAT16,
          "hstu attention: the GPU's kernels take bfloat16 and float16");
  require(width == 64 || width == 128 || width == 256,
          "hstu attention: the GPU's kernels take heads of width 64, 128 and 256");
  require(Property(cudaDevAttrComputeCapabilityMajor) == 9,
          "hstu attention: the GPU's kernels need compute capability 9.0 (H100, H200)");
}

// Starts a kernel of which a block fills a multiprocessor, as many blocks as there are of those.
template <class Arguments>
void LaunchPersistent(void (*kernel)(Arguments), const Arguments& in, int64_t works, int threads,
                      int shared_bytes, cudaStream_t stream, const char* what) {
  const int64_t blocks = std::min<int64_t>(works, Property(cudaDevAttrMultiProcessorCount));
  gmeta::Launch(kernel, static_cast<unsigned>(blocks), threads, shared_bytes, stream, what, in);
}

// Calls launch(T, width) for the type and the width of an attention.
template <class Launch>
void Dispatch(const GmetaHstuAttention& a, const Launch& launch) {
  CheckSupported(a.dtype, a.width);
  if (a.tokens == 0 || a.heads == 0) return;
  const auto of_type = [&](auto type) {
    if (a.width == 64) return launch(type, std::integral_constant<int, 64>());
    if (a.width == 128) return launch(type, std::integral_constant<int, 128>());
    return launch(type, std::integral_constant<int, 256>());
  };
  a.dtype == GMETA_BFLOAT16 ? of_type(__nv_bfloat16()) : of_type(__half());
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_HSTU_ATTENTION_GPU_LAUNCH_CUH_
