// The children of a node on the GPU: a warp reads them, 32 at a time, and sums the exponentials of
// their logits (ops/trie/host/siblings.h). They are read once for the greatest logit, once for the
// sum, and by what uses them: after the first time they are in the cache.

#ifndef GMETA_OPS_TRIE_GPU_SIBLINGS_CUH_
#define GMETA_OPS_TRIE_GPU_SIBLINGS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "ops/trie/gpu/trie_abi.h"

namespace gmeta::trie {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kFar = -87.0f;  // what is so far below the most probable counts as zero

// The children of a node: all lanes of a warp have the same.
struct WarpSiblings {
  int64_t first;
  int32_t count;    // of children; 0, if none has a chance
  int32_t allowed;  // how many of these may come out
  float most, sum;  // of logits, and of exponentials
  bool wrong;       // the node isn't there, or what it leads to

  __device__ float Weight(float logit) const {
    const float below = logit - most;
    return below < kFar ? 0.0f : expf(below);
  }
  __device__ float LogProb(float logit, float log_sum) const { return (logit - most) - log_sum; }
};

// Calls visit(child, digit, logit) for every 32nd of the children that may come out, from the
// lane's own on. Digits must be right.
template <class Visit>
__device__ __forceinline__ void EachChild(const GmetaTrieLevel& level, int64_t first, int32_t count,
                                          const float* logits, const Visit& visit) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32) {
    const int64_t child = first + i;
    if (level.allowed != nullptr && level.allowed[child] == 0) continue;
    const int32_t digit = level.digits[child];
    visit(child, digit, logits[digit]);
  }
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
    const int32_t digit = level.digits[child];
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
  EachChild(level, s.first, s.count, logits,
            [&](int64_t, int32_t, float logit) { s.sum += s.Weight(logit); });
  for (int by = 16; by > 0; by /= 2) s.sum += __shfl_xor_sync(kAllLanes, s.sum, by);
  return s;
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_SIBLINGS_CUH_
