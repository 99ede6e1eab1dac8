// SiLU(x) = x / (1 + exp(-x)) of single numbers, and its gradient. It is for rows, whose last
// digits matter. Scores use a cheaper one (forward.cuh).

#ifndef GMETA_OPS_LAYER_ACTIVATION_CUH_
#define GMETA_OPS_LAYER_ACTIVATION_CUH_

#include <cuda_runtime.h>

#include "ops/hopper/hopper.cuh"

namespace gmeta::hstu {

// IEEE division branches for each number, and its latency can't be hidden. Numbers below 2^-126,
// which the special function unit treats as 0, change nothing here.
__device__ __forceinline__ float Sigmoid(float x) {
  constexpr float kLog2E = 1.44269504f;
  return hopper::FastReciprocal(1.0f + hopper::FastExp2(-kLog2E * x));
}
__device__ __forceinline__ float Silu(float x) { return x * Sigmoid(x); }
// Returns the gradient of x, given `of`, that of SiLU(x).
__device__ __forceinline__ float SiluGradient(float of, float x) {
  const float g = Sigmoid(x);
  return of * g * (1.0f + x * (1.0f - g));
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_ACTIVATION_CUH_
