// What the pass over dS leaves of the gradients of a bias (bias_gradient.cuh), and its sums.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_SUMS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_SUMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/backward_memory.cuh"
#include "ops/attention/gpu/strips.cuh"

namespace gmeta::hstu {

// Sums of a launch: a slice of the table of places for each warpgroup, and for each warp what is
// below the table's first place, at it or above its last, and of each bucket.
struct BiasParts {
  int blocks;   // of threads
  int places;   // of the table, 2 n - 1; 0: there is none
  int buckets;  // likewise
  float* slices;
  float* of_warps;

  static constexpr int kWarps = 4 * kGroups;  // of a block

  __host__ __device__ int Slices() const { return blocks * kGroups; }
  __host__ __device__ int64_t SliceBytes() const {
    return static_cast<int64_t>(sizeof(float)) * Slices() * places;
  }
  __host__ __device__ int OfWarp() const { return 2 + buckets; }
  __host__ __device__ int64_t Bytes() const {
    return SliceBytes() + static_cast<int64_t>(sizeof(float)) * blocks * kWarps * OfWarp();
  }
  void PlaceIn(void* memory) {
    slices = static_cast<float*>(memory);
    of_warps = slices + static_cast<int64_t>(Slices()) * places;
  }
};

// Those of an attention that has a bias, on the current device.
BiasParts PartsOf(const GmetaHstuAttention& attention);

// Writes the gradients of the tables, `scale` times the sums over all parts, in float64.
void SumBiasParts(const BiasParts& parts, const PlanHeader* header, float scale,
                  const GmetaHstuBiasGradient& to, cudaStream_t stream);

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_SUMS_CUH_
