// SiLU(x) = x / (1 + exp(-x)) of single numbers, and its gradient: of rows, whose last digits
// count. Scores have a cheaper one (gpu_forward.cuh).

#ifndef GMETA_OPS_HSTU_LAYER_ACTIVATION_CUH_
#define GMETA_OPS_HSTU_LAYER_ACTIVATION_CUH_

#include <cuda_runtime.h>

namespace gmeta::hstu {

// Division as IEEE has it branches for each number, and its latency can't be hidden.
__device__ __forceinline__ float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float Silu(float x) { return x * Sigmoid(x); }
// The gradient of x, of that of SiLU(x).
__device__ __forceinline__ float SiluGradient(float of, float x) {
  const float g = Sigmoid(x);
  return of * g * (1.0f + x * (1.0f - g));
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_HSTU_LAYER_ACTIVATION_CUH_
