// The gradients of a bias's tables on Hopper: sums of dS over all heads, rows and columns, by
// distance in places and by bucket of time.
//
//   dp_m = s sum_{j - i + n - 1 = m} dS_ij     dt_b = s sum_{b_ij = b} dS_ij     (backward.cuh)
//
// The pass for dQ has dS in float32 in its registers, one block after another, and sums it here.
// Sums over all tiles have one order, without atomic additions of floats: a block of threads has
// the same tiles in each run (BackwardProducer::InTurn), a thread has the same numbers, and the
// final partial sums are added in order of their numbers (table_parts.cuh).

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_TABLE_SUMS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_TABLE_SUMS_CUH_

#include "ops/attention/gpu/backward/memory.cuh"
#include "ops/attention/gpu/bias/bucket_sums.cuh"
#include "ops/attention/gpu/bias/diagonal_sums.cuh"

namespace gmeta::hstu {

// The sums of a thread of one of the warpgroups that compute.
template <class P, bool kThere = P::kOfBias>
class TableSums {
 public:
  // For `of_buckets` see BucketSums.
  __device__ __forceinline__ TableSums(const BackwardArguments& in, BackwardMemory<P>& memory,
                                       int group, float (&of_buckets)[kBucketsOfLane])
      : parts_(in.parts),
        memory_(memory),
        group_(group),
        diagonals_(parts_, SliceOf(parts_, group), 1 + group),
        buckets_(of_buckets) {}

  // Makes the shared memory ready. All threads of the warpgroup call it before the first block and,
  // if the memory has been used for something else, before others.
  __device__ __forceinline__ void Clear() {
    if constexpr (!P::kTimesOnly) Shared().Clear(1 + group_);
  }

  // Adds dS of a block whose first column is `column`, with its bias. All threads of the warpgroup
  // call it; `square` is the number of the warp's 16 rows in the tile.
  template <class Bias>
  __device__ __forceinline__ void Add(const OwnPlace& own, int column, const Bias& bias, int square,
                                      const float (&of_scores)[kStripNumbers]) {
    if constexpr (P::kTimesOnly) {
      buckets_.template Add<FewBuckets::kSize>(bias, square, of_scores,
                                               memory_.few_buckets[group_].of_warps[OwnWarp()]);
    } else {
      Diagonals& shared = Shared();
      if (parts_.places > 0) diagonals_.Add(shared, own, column, of_scores);
      static_assert(sizeof(shared.of_warps[0]) >= sizeof(int) * kMostBuckets);
      if (parts_.buckets > 0) {
        buckets_.template Add<kMostBuckets>(bias, square, of_scores,
                                            reinterpret_cast<int*>(shared.of_warps[OwnWarp()]));
      }
    }
  }

  // Writes the sums of the warp.
  __device__ __forceinline__ void Write() {
    if constexpr (!P::kTimesOnly) diagonals_.AddToSlice();
    const int warp = static_cast<int>(blockIdx.x) * BiasParts::kWarps + group_ * 4 + OwnWarp();
    float* const to = parts_.of_warps + static_cast<int64_t>(warp) * parts_.OfWarp();
    const float below = SumOfWarp(diagonals_.below()), above = SumOfWarp(diagonals_.above());
    if (threadIdx.x % 32 == 0) to[0] = below, to[1] = above;
    buckets_.Write(parts_.buckets, to + 2);
  }

 private:
  static __device__ __forceinline__ float* SliceOf(const BiasParts& parts, int group) {
    return parts.slices + static_cast<int64_t>(blockIdx.x * kGroups + group) * parts.places;
  }
  static __device__ __forceinline__ int OwnWarp() {
    return static_cast<int>(threadIdx.x) % 128 / 32;
  }

  // The shared memory, in place of a group's own rows if there is no other: these are in registers
  // by then.
  __device__ __forceinline__ Diagonals& Shared() {
    if constexpr (P::kAlone) {
      static_assert(P::kOwnTensors * P::kTileBytes >= static_cast<int>(sizeof(Diagonals)));
      return *reinterpret_cast<Diagonals*>(memory_.own[0][group_]);
    } else {
      return memory_.diagonals[group_];
    }
  }

  const BiasParts& parts_;
  BackwardMemory<P>& memory_;
  const int group_;
  DiagonalSums diagonals_;
  BucketSums buckets_;
};

template <class P>
class TableSums<P, false> {
 public:
  __device__ __forceinline__ TableSums(const BackwardArguments&, BackwardMemory<P>&, int,
                                       float (&)[kBucketsOfLane]) {}
  __device__ __forceinline__ void Clear() {}
  __device__ __forceinline__ void Write() {}
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_TABLE_SUMS_CUH_
