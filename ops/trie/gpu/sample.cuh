// A child of each beam, drawn by the children's probabilities (ops/trie/host/sample.h): a warp a
// beam. Weights are whole numbers, so the warp adds them 32 at a time and draws what the CPU draws,
// which adds them one after another.

#ifndef GMETA_OPS_TRIE_GPU_SAMPLE_CUH_
#define GMETA_OPS_TRIE_GPU_SAMPLE_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "ops/trie/gpu/beams.cuh"
#include "ops/trie/gpu/siblings.cuh"
#include "ops/trie/weights.h"

namespace gmeta::trie {

// The sum of a number of each lane, up to and with this one.
__device__ __forceinline__ uint64_t SumUpTo(uint64_t x) {
  for (int by = 1; by < 32; by *= 2) {
    const uint64_t before = __shfl_up_sync(kAllLanes, x, by);
    if (static_cast<int>(threadIdx.x % 32) >= by) x += before;
  }
  return x;
}

// By a whole warp: the child that the draw of a beam falls on.
__device__ __forceinline__ int64_t DrawChild(const GmetaTrieLevel& level, const WarpSiblings& s,
                                             const float* logits, const Noise& noise,
                                             int32_t beam) {
  const WholeWeights whole(static_cast<uint64_t>(s.allowed));
  uint64_t total = 0;
  EachWeight(level, s, logits, [&](int64_t, bool, float weight) {
    total += whole.Of(weight);
    return true;
  });
  for (int by = 16; by > 0; by /= 2) total += __shfl_xor_sync(kAllLanes, total, by);
  const uint64_t end = noise.Below(static_cast<uint64_t>(beam), total);
  uint64_t reached = 0;
  int64_t drawn = -1;
  EachWeight(level, s, logits, [&](int64_t child, bool, float weight) {
    const uint64_t sum = reached + SumUpTo(whole.Of(weight));
    const unsigned above = __ballot_sync(kAllLanes, sum > end);
    reached = __shfl_sync(kAllLanes, sum, 31);
    if (above != 0) drawn = __shfl_sync(kAllLanes, child, __ffs(above) - 1);
    return above == 0;
  });
  return drawn;
}

__global__ void __launch_bounds__(kRowThreads)
    Sample(BeamsOnGpu from, GmetaTrieLevel level, GmetaTrieNoise of_users, NextOnGpu to) {
  const int64_t place = RowOfWarp();
  if (place >= from.users * from.beams) return;
  const WarpSiblings s = from.SiblingsOf(level, place);
  float score = s.wrong ? NAN : -INFINITY;
  int64_t node = -1;
  int32_t beam = -1;
  if (!s.wrong && s.count > 0) {
    const float* const logits = from.LogitsOf(place);
    beam = static_cast<int32_t>(place % from.beams);
    node = DrawChild(level, s, logits, NoiseOf(of_users, place / from.beams), beam);
    score = from.scores[place] + s.LogProb(logits[DigitOf(level, node)], LogOfSum(s.sum));
  }
  if (threadIdx.x % 32 == 0) to.Set(place, score, node, beam, 0.0f);
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_SAMPLE_CUH_
