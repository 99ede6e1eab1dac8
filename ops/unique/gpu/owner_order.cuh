// Orders keys by the rank that owns them, on the GPU. The keys of a rank keep their order, and a
// key may occur any number of times.
//
//   1. Find. Each key's owner, and the number of keys of each rank.
//   2. Sort. Places by owner: a stable radix sort of as many bits as a rank's number has.
//   3. Move. Each key goes to its new place, which is noted at its former one.

#ifndef GMETA_OPS_UNIQUE_GPU_OWNER_ORDER_CUH_
#define GMETA_OPS_UNIQUE_GPU_OWNER_ORDER_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/common/murmur_hash3.h"
#include "ops/table/core/logical_shards.h"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace owner_order {

inline constexpr uint32_t kThreads = 256;

// Finds the owner of each key, `ranks` for places without a key. Adds the keys of rank r to
// counts[r]. `count` is the number of keys, null if there are n.
__global__ void __launch_bounds__(kThreads)
    FindOwners(const int64_t* __restrict__ keys, const int32_t* __restrict__ count, uint32_t n,
               uint32_t ranks, uint16_t* __restrict__ owners, int32_t* __restrict__ places,
               int32_t* counts) {
  __shared__ int32_t sums[kLogicalShards];
  for (uint32_t r = threadIdx.x; r < ranks; r += kThreads) sums[r] = 0;
  __syncthreads();
  const uint32_t held = count == nullptr ? n : static_cast<uint32_t>(*count);
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += uint64_t{gridDim.x} * kThreads) {
    uint32_t owner = ranks;
    if (i < held) {
      owner = LogicalShard(MurmurHash3(keys[i])) * ranks >> kLog2LogicalShards;
      atomicAdd(sums + owner, 1);
    }
    owners[i] = static_cast<uint16_t>(owner);
    places[i] = static_cast<int32_t>(i);
  }
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < ranks; r += kThreads) {
    if (sums[r] != 0) atomicAdd(counts + r, sums[r]);
  }
}

// Moves the keys into their order. order[p] is the former place of the key at place p.
__global__ void __launch_bounds__(kThreads)
    Move(const int64_t* __restrict__ from, const int32_t* __restrict__ order,
         const int32_t* __restrict__ count, uint32_t n, int64_t* __restrict__ keys,
         int32_t* __restrict__ moved) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= (count == nullptr ? n : static_cast<uint32_t>(*count))) return;
  keys[i] = from[order[i]];
  moved[order[i]] = static_cast<int32_t>(i);
}

}  // namespace owner_order

// Sorts up to n keys, n > 0, by one of `ranks` owners, in scratch memory that it cuts from `space`.
class OwnerOrder {
 public:
  OwnerOrder(int64_t n, int32_t ranks, Workspace* space) : n_(n), ranks_(ranks) {
    while ((1 << bits_) <= ranks) ++bits_;  // `ranks` itself is one of the numbers
    owners_ = space->Take<uint16_t>(n);
    sorted_owners_ = space->Take<uint16_t>(n);
    places_ = space->Take<int32_t>(n);
    order_ = space->Take<int32_t>(n);
    CheckCuda(Sort(nullptr, nullptr), "sizing the sort by owner");
    sort_ = space->Take<char>(sort_bytes_);
  }

  // Writes the keys in their order, and to moved[i] the place of the key that was at place i. Adds
  // the number of keys of each rank to `counts`. `count`, in device memory, is the number of keys;
  // null: n.
  void Run(const int64_t* from, const int32_t* count, int64_t* keys, int32_t* moved,
           int32_t* counts, cudaStream_t stream) {
    using owner_order::kThreads;
    const uint32_t size = static_cast<uint32_t>(n_);
    const uint32_t blocks = (size + kThreads - 1) / kThreads;
    Launch(owner_order::FindOwners, std::min(blocks, 1024u), kThreads, 0, stream, "order by owner",
           from, count, size, static_cast<uint32_t>(ranks_), owners_, places_, counts);
    CheckCuda(Sort(sort_, stream), "sorting by owner");
    Launch(owner_order::Move, blocks, kThreads, 0, stream, "order by owner", from, order_, count,
           size, keys, moved);
  }

 private:
  // Without memory to sort in it only counts how many bytes that takes.
  cudaError_t Sort(void* memory, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(memory, sort_bytes_, owners_, sorted_owners_, places_,
                                           order_, n_, 0, bits_, stream);
  }

  int64_t n_;
  int32_t ranks_;
  int bits_ = 1;
  uint16_t *owners_, *sorted_owners_;
  int32_t *places_, *order_;
  void* sort_;
  size_t sort_bytes_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_GPU_OWNER_ORDER_CUH_
