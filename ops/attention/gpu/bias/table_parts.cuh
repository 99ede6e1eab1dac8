// The partial sums that a launch leaves for the gradients of a bias's tables (table_sums.cuh), and
// their totals.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_TABLE_PARTS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_TABLE_PARTS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/plan/strips.cuh"

namespace gmeta::hstu {

// Sums of a launch. Each warpgroup has a slice of the table of places. Each warp has the sums for
// places at or before the table's first, for places at or after its last, and for each bucket.
struct BiasParts {
  int blocks;   // blocks of threads
  int places;   // size of the table of places, 2 n - 1; 0: no such table
  int buckets;  // size of the table of buckets; 0: no such table
  float* slices;
  float* of_warps;

  static constexpr int kGroups = kTileStrips;  // warpgroups per block
  static constexpr int kWarps = 4 * kGroups;

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

// Returns the sizes for an attention that has a bias on the current device.
BiasParts PartsOf(const GmetaHstuAttention& attention);

// Writes the tables' gradients: `scale` times the sums over all parts, which it adds in float64.
void SumBiasParts(const BiasParts& parts, const PlanHeader* header, float scale,
                  const GmetaHstuBiasGradient& to, cudaStream_t stream);

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_TABLE_PARTS_CUH_
