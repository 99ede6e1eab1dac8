// Shared by the launches of a layer's kernels: the dtypes and the widths of rows.

#ifndef GMETA_OPS_LAYER_ROW_TYPES_CUH_
#define GMETA_OPS_LAYER_ROW_TYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <string>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/common/gpu/cuda_error.cuh"

namespace gmeta::hstu {

// Calls launch(T()) for the type T of a dtype.
template <class Launch>
void OfType(int32_t dtype, const Launch& launch) {
  if (dtype == GMETA_BFLOAT16) return launch(__nv_bfloat16());
  if (dtype == GMETA_FLOAT16) return launch(__half());
  throw CudaError(GMETA_CUDA_UNSUPPORTED,
                  "hstu layer: the GPU's kernels take bfloat16 and float16");
}

inline void CheckWidth(int32_t width, int32_t most) {
  if (width <= 0 || width % 8 != 0 || width > most) {
    throw CudaError(GMETA_CUDA_UNSUPPORTED,
                    "hstu layer: rows must have a multiple of 8 numbers, up to " +
                        std::to_string(most) + ", got " + std::to_string(width));
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_ROW_TYPES_CUH_
