// The children of a node on the GPU: a warp reads them, 32 at a time, and sums the exponentials of
// their logits (ops/trie/host/siblings.h). They are read once for the greatest logit, once for the
// sum, and by what uses them: after the first time they are in the cache.
//
// The sum has the CPU's bits: the allowed children are added in 16 sums in turn, and these are
// folded in the same order. So scores, ranks and draws are the CPU's, and no tie, almost equal rank
// or draw has another outcome (ops/trie/weights.h states the exceptions).

#ifndef GMETA_OPS_TRIE_GPU_SIBLINGS_CUH_
#define GMETA_OPS_TRIE_GPU_SIBLINGS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "ops/trie/gpu/trie_abi.h"
#include "ops/trie/level.h"
#include "ops/trie/weights.h"

namespace gmeta::trie {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// The children of a node: all lanes of a warp have the same.
struct WarpSiblings {
  int64_t first;
  int32_t count;    // of children; 0, if none has a chance
  int32_t allowed;  // how many of these lead to an allowed item
  float most, sum;  // of logits, and of exponentials
  bool wrong;       // the node, or what it leads to, doesn't exist

  __device__ float Weight(float logit) const { return trie::Weight(logit - most); }
  __device__ float LogProb(float logit, float log_sum) const { return (logit - most) - log_sum; }
};

__device__ __forceinline__ int32_t DigitOf(const GmetaTrieLevel& level, int64_t child) {
  return level.wide_digits == nullptr ? level.digits[child]
                                      : Level::Narrow(level.wide_digits[child]);
}

// Calls visit(child, digit, logit) for every 32nd of the allowed children, from the lane's own on.
// Digits must be right.
template <class Visit>
__device__ __forceinline__ void EachChild(const GmetaTrieLevel& level, int64_t first, int32_t count,
                                          const float* logits, const Visit& visit) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32) {
    const int64_t child = first + i;
    if (level.allowed != nullptr && level.allowed[child] == 0) continue;
    const int32_t digit = DigitOf(level, child);
    visit(child, digit, logits[digit]);
  }
}

// Calls visit(child, is_there, weight) for the 32 children of a warp's lanes, and for the next, all
// lanes together, as long as it returns true. A missing child has weight 0.
template <class Visit>
__device__ __forceinline__ void EachWeight(const GmetaTrieLevel& level, const WarpSiblings& s,
                                           const float* logits, const Visit& visit) {
  for (int32_t begin = 0; begin < s.count; begin += 32) {
    const int32_t i = begin + static_cast<int32_t>(threadIdx.x % 32);
    const int64_t child = s.first + i;
    const bool there = i < s.count && (level.allowed == nullptr || level.allowed[child] != 0);
    const float weight = there ? s.Weight(logits[DigitOf(level, child)]) : 0.0f;
    if (!visit(child, there, weight)) return;
  }
}

// The place of the n-th bit that is set, from 0 on; that of some bit, if there are fewer.
__device__ __forceinline__ int PlaceOfBit(unsigned bits, int n) {
  int place = 0;
  for (int width = 16; width > 0; width /= 2) {
    const int here = __popc(bits >> place & ((1u << width) - 1));
    if (n < here) continue;
    n -= here, place += width;
  }
  return place;
}

// By a whole warp.
__device__ __forceinline__ float SumOfWeights(const GmetaTrieLevel& level, const WarpSiblings& s,
                                              const float* logits) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sum = 0.0f;  // one of 16: lanes l and l + 16 have the same
  int before = 0;    // of the children before, modulo 16
  EachWeight(level, s, logits, [&](int64_t, bool there, float weight) {
    const unsigned all = __ballot_sync(kAllLanes, there);
    const int count = __popc(all);
    for (int n = (lane - before) & 15; n < 32; n += 16) {  // two, whose numbers are l modulo 16
      const float from = __shfl_sync(kAllLanes, weight, PlaceOfBit(all, n));
      if (n < count) sum += from;
    }
    before = (before + count) & 15;
    return true;
  });
  for (int by = 8; by > 0; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
  return sum;
}

// By a whole warp.
__device__ __forceinline__ WarpSiblings ReadSiblings(const GmetaTrieLevel& level, int64_t node,
                                                     const float* logits, int64_t codes) {
  WarpSiblings s{0, 0, 0, -INFINITY, 0.0f, true};
  if (node < 0 || node >= level.nodes) return s;
  s.first = level.starts[node];
  const int64_t last = level.starts[node + 1];
  if (s.first < 0 || last < s.first || last > level.children || last - s.first > INT32_MAX) {
    return s;
  }
  s.count = static_cast<int32_t>(last - s.first);
  bool wrong = false;
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < s.count; i += 32) {
    const int64_t child = s.first + i;
    if (level.allowed != nullptr && level.allowed[child] == 0) continue;
    const int32_t digit = DigitOf(level, child);
    if (digit < 0 || digit >= codes) {
      wrong = true;
      continue;
    }
    const float logit = logits[digit];
    wrong = wrong || !(logit < INFINITY);
    s.most = fmaxf(s.most, logit);
    ++s.allowed;
  }
  for (int by = 16; by > 0; by /= 2) {
    s.most = fmaxf(s.most, __shfl_xor_sync(kAllLanes, s.most, by));
    s.allowed += __shfl_xor_sync(kAllLanes, s.allowed, by);
  }
  s.wrong = __ballot_sync(kAllLanes, wrong) != 0;
  if (s.wrong || s.most == -INFINITY) {
    s.count = s.allowed = 0;
    return s;
  }
  s.sum = SumOfWeights(level, s, logits);
  return s;
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_SIBLINGS_CUH_
