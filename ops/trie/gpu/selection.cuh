// The k greatest of many numbers that a block can list again and again, without storing them: a
// radix selection, from the highest bits on.
//
// A number is three words: the rank, as bits whose order is the numbers' own, and for what is equal
// the hash and the beam, inverted, so that the smaller comes first (ops/trie/host/beam_step.h). In
// a pass each thread counts its numbers that begin as the k-th does, as far as that is known, by
// their next 11 bits. The counts show the k-th's next bits. When all that begin as it does
// are among the k best, the passes end: after two or three, if few ranks are equal.

#ifndef GMETA_OPS_TRIE_GPU_SELECTION_CUH_
#define GMETA_OPS_TRIE_GPU_SELECTION_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/trie/gpu/siblings.cuh"

namespace gmeta::trie {

// Bits of a float in the order of the numbers. There is no -0 among ranks.
__device__ __forceinline__ uint32_t OrderedBits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float FromOrderedBits(uint32_t bits) {
  return __uint_as_float(bits >> 31 != 0 ? bits & 0x7fffffffu : ~bits);
}

struct Number {
  uint64_t words[3];  // of 32, 64 and 32 bits
};

class Selection {
 public:
  static constexpr int kBins = 2048, kGroups = 32, kInGroup = kBins / kGroups;

  // Where the k-th number begins: as far as `known` bits of the words say.
  struct Threshold {
    uint64_t words[3], known[3];
    uint32_t left;  // how many of those that begin so are among the k best
    bool done;
  };

  // In shared memory. By one thread, before the block synchronizes.
  __device__ void Start(uint32_t k) {
    threshold = Threshold{};
    threshold.left = k;
  }

  // Whether a number is among the k best, as far as is known.
  __device__ __forceinline__ bool Has(const Number& x) const {
    for (int word = 0; word < 3; ++word) {
      const uint64_t begins = x.words[word] & threshold.known[word];
      if (begins != threshold.words[word]) return begins > threshold.words[word];
    }
    return true;
  }

  // By the whole block: finds the threshold of the k-th. each(visit) calls visit(number) for all
  // numbers of a thread; there are more than k.
  template <class Each>
  __device__ __forceinline__ void Run(const Each& each) {
    RunWord<0>(each);
    RunWord<1>(each);
    RunWord<2>(each);
  }

  Threshold threshold;

 private:
  template <int kWord, class Each>
  __device__ __forceinline__ void RunWord(const Each& each) {
#pragma unroll 1
    for (int top = kWord == 1 ? 64 : 32; top > 0 && !threshold.done; top -= 11) {
      Pass<kWord>(each, max(top - 11, 0), min(top, 11));
    }
  }

  template <int kWord, class Each>
  __device__ __forceinline__ void Pass(const Each& each, int shift, int width) {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += blockDim.x) bins_[i] = 0;
    __syncthreads();
    each([&](const Number& x) {
      for (int i = 0; i <= kWord; ++i) {
        if ((x.words[i] & threshold.known[i]) != threshold.words[i]) return;
      }
      atomicAdd(&bins_[x.words[kWord] >> shift & ((1u << width) - 1)], 1u);
    });
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x % 32), warps = static_cast<int>(blockDim.x / 32);
    for (int group = static_cast<int>(threadIdx.x / 32); group < kGroups; group += warps) {
      uint32_t sum = bins_[kInGroup * group + lane] + bins_[kInGroup * group + 32 + lane];
      for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
      if (lane == 0) groups_[group] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) Narrow(kWord, shift, width);
    __syncthreads();
  }

  // By one warp: finds the bin of the k-th number, from the highest bin on.
  __device__ void Narrow(int word, int shift, int width) {
    const int lane = static_cast<int>(threadIdx.x);
    uint32_t left = threshold.left;
    const int group = kGroups - 1 - FirstReaching(groups_[kGroups - 1 - lane], &left);
    const int upper =
        kInGroup * group + kInGroup - 1 - 2 * lane;  // a lane has this bin and the next
    const int pair = FirstReaching(bins_[upper] + bins_[upper - 1], &left);
    __syncwarp();
    if (lane != pair) return;
    const bool is_upper = left <= bins_[upper];
    if (!is_upper) left -= bins_[upper];
    const int bin = is_upper ? upper : upper - 1;
    threshold.words[word] |= static_cast<uint64_t>(bin) << shift;
    threshold.known[word] |= static_cast<uint64_t>((1u << width) - 1) << shift;
    threshold.left = left;
    threshold.done = left == bins_[bin];
  }

  // Returns the first lane at which the sum of counts, from lane 0 on, reaches *left, and takes
  // what is before it off *left.
  __device__ static int FirstReaching(uint32_t count, uint32_t* left) {
    uint32_t sum = count;
    for (int by = 1; by < 32; by *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, sum, by);
      if (static_cast<int>(threadIdx.x % 32) >= by) sum += before;
    }
    const int lane = __ffs(__ballot_sync(kAllLanes, sum >= *left)) - 1;
    *left -= __shfl_sync(kAllLanes, sum - count, lane);
    return lane;
  }

  uint32_t bins_[kBins], groups_[kGroups];
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_SELECTION_CUH_
