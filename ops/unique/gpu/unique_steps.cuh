// The kernels of unique.cuh, in the order in which they run; owner_order.cuh has those by owner.

#ifndef GMETA_OPS_UNIQUE_GPU_UNIQUE_STEPS_CUH_
#define GMETA_OPS_UNIQUE_GPU_UNIQUE_STEPS_CUH_

#include <cstdint>

#include "ops/common/murmur_hash3.h"

namespace gmeta {
namespace unique {

inline constexpr uint32_t kThreads = 256;
inline constexpr uint32_t kWarps = kThreads / 32;
inline constexpr uint32_t kMostStretches = 1024;
inline constexpr uint32_t kEmpty = 0xffffffffu;

// Writes each position's slot to `slot_of`.
__global__ void __launch_bounds__(kThreads)
    Claim(const int64_t* __restrict__ ids, uint32_t n, uint32_t* slots, uint32_t mask,
          uint32_t* __restrict__ slot_of) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t id = ids[i];
  uint32_t at = static_cast<uint32_t>(MurmurHash3(id)) & mask;
  for (;; at = (at + 1) & mask) {
    uint32_t held = slots[at];
    if (held == kEmpty) {
      held = atomicCAS(slots + at, kEmpty, i);
      if (held == kEmpty) break;
    }
    if (ids[held] == id) {
      if (i < held) atomicMin(slots + at, i);
      break;
    }
  }
  slot_of[i] = at;
}

// Sets the bits of first positions. Stretch b has the words from b * words on, and firsts[b] of its
// bits are set.
__global__ void __launch_bounds__(kThreads)
    Mark(const uint32_t* __restrict__ slots, const uint32_t* __restrict__ slot_of, uint32_t n,
         uint32_t words, uint32_t* __restrict__ bits, uint32_t* __restrict__ firsts) {
  __shared__ uint32_t total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  const uint32_t lane = threadIdx.x % 32;
  uint32_t sum = 0;
  for (uint32_t word = threadIdx.x / 32; word < words; word += kWarps) {
    const uint64_t i = (uint64_t{blockIdx.x} * words + word) * 32 + lane;
    const uint32_t mask = __ballot_sync(0xffffffffu, i < n && slots[slot_of[i]] == i);
    if (lane == 0) bits[uint64_t{blockIdx.x} * words + word] = mask;
    sum += __popc(mask);
  }
  if (lane == 0) atomicAdd(&total, sum);
  __syncthreads();
  if (threadIdx.x == 0) firsts[blockIdx.x] = total;
}

// Returns the sum of `value` over the threads before this one in the block; `all` gets the sum over
// all of them.
__device__ inline uint32_t SumBefore(uint32_t value, uint32_t* warp_sums, uint32_t* all) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t sum = value;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  uint32_t before = 0, total = 0;
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += warp_sums[warp];
    total += warp_sums[warp];
  }
  __syncthreads();
  *all = total;
  return before + sum - value;
}

__global__ void __launch_bounds__(kThreads)
    Number(const int64_t* __restrict__ ids, uint32_t* __restrict__ slots,
           const uint32_t* __restrict__ slot_of, uint32_t words, const uint32_t* __restrict__ bits,
           const uint32_t* __restrict__ firsts, int64_t* __restrict__ keys,
           int32_t* __restrict__ count) {
  __shared__ uint32_t warp_sums[kWarps];
  uint32_t mine = 0;
  for (uint32_t b = threadIdx.x; b < blockIdx.x; b += kThreads) mine += firsts[b];
  uint32_t base;
  SumBefore(mine, warp_sums, &base);
  // First one thread per word of bits, then one warp for the 32 positions of each of those words.
  for (uint32_t start = 0; start < words; start += kThreads) {
    const uint32_t word = start + threadIdx.x;
    const uint32_t mask = word < words ? bits[uint64_t{blockIdx.x} * words + word] : 0;
    uint32_t all;
    const uint32_t before = base + SumBefore(__popc(mask), warp_sums, &all);
    for (uint32_t k = 0; k < 32; ++k) {
      const uint32_t its_mask = __shfl_sync(0xffffffffu, mask, k);
      const uint32_t its_before = __shfl_sync(0xffffffffu, before, k);
      const uint32_t lane = threadIdx.x % 32;
      if ((its_mask >> lane & 1) == 0) continue;
      const uint32_t its_word = start + threadIdx.x - lane + k;
      const uint64_t i = (uint64_t{blockIdx.x} * words + its_word) * 32 + lane;
      const uint32_t place = its_before + __popc(its_mask & ((1u << lane) - 1));
      keys[place] = ids[i];
      slots[slot_of[i]] = place;
    }
    base += all;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) *count = static_cast<int32_t>(base);
}

// Writes the inverse. If `moved` is given, place p has become moved[p].
__global__ void __launch_bounds__(kThreads)
    Answer(const uint32_t* __restrict__ slots, const int32_t* __restrict__ moved, uint32_t n,
           int32_t* inverse) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  const uint32_t place = slots[static_cast<uint32_t>(inverse[i])];
  inverse[i] = moved == nullptr ? static_cast<int32_t>(place) : moved[place];
}

}  // namespace unique
}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_GPU_UNIQUE_STEPS_CUH_
