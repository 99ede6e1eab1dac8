// The ranks by which a step on the GPU keeps the best (ops/trie/host/ranks.h).
//
// ByScore: a child's rank is its score, which costs three subtractions, so it is computed wherever
// it is needed.
//
// ByGumbel: a rank costs six exponentials and logarithms in double precision, and a step asks for
// it some five times. So an earlier kernel, WriteGumbelRanks, a warp a beam, writes the ranks of a
// beam's children to a row as long as its logits: that of a child where the logit of its digit is.
// It spreads over the whole GPU, where the step has a block a user.

#ifndef GMETA_OPS_TRIE_GPU_RANKS_CUH_
#define GMETA_OPS_TRIE_GPU_RANKS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "ops/trie/gpu/beams.cuh"
#include "ops/trie/gpu/siblings.cuh"
#include "ops/trie/gumbel_rank.h"

namespace gmeta::trie {

// A beam whose siblings have been read.
struct ReadBeam {
  int64_t first;
  int32_t count;
  float score, most, log_sum;

  // Not -0, whose bits would be another rank's.
  __device__ float ScoreOf(float logit) const { return score + ((logit - most) - log_sum) + 0.0f; }
};

struct ByScoreOnGpu {
  static constexpr bool kAreScores = true;
  __device__ bool IsWrong(int64_t) const { return false; }
  // What OfChild needs, for each digit.
  __device__ const float* RowOf(const BeamsOnGpu& from, int64_t place) const {
    return from.LogitsOf(place);
  }
  __device__ float OfChild(const ReadBeam& beam, float logit) const { return beam.ScoreOf(logit); }
  // An upper bound of the children's ranks.
  __device__ float MostOfChildren(const ReadBeam& beam, int64_t) const {
    return beam.ScoreOf(beam.most);
  }
};

struct ByGumbelOnGpu {
  const float* of_beams;
  const float* of_children;  // as WriteGumbelRanks has written them

  static constexpr bool kAreScores = false;
  __device__ bool IsWrong(int64_t place) const { return of_beams[place] != of_beams[place]; }
  __device__ const float* RowOf(const BeamsOnGpu& from, int64_t place) const {
    return of_children + place * from.codes;
  }
  __device__ float OfChild(const ReadBeam&, float rank) const { return rank; }
  __device__ float MostOfChildren(const ReadBeam&, int64_t place) const {
    return of_beams[place] + 0.0f;
  }
};

__global__ void __launch_bounds__(kRowThreads)
    WriteGumbelRanks(BeamsOnGpu from, GmetaTrieLevel level, GmetaTrieNoise of_users,
                     const float* of_beams, float* of_children) {
  const int64_t place = RowOfWarp();
  if (place >= from.users * from.beams) return;
  const WarpSiblings s = from.SiblingsOf(level, place);
  if (s.count == 0) return;
  const ReadBeam beam{s.first, s.count, from.scores[place], s.most, LogOfSum(s.sum)};
  Noise noise = NoiseOf(of_users, place / from.beams);
  const auto each = [&](const auto& visit) {
    EachChild(level, s.first, s.count, from.LogitsOf(place),
              [&](int64_t child, int32_t digit, float logit) {
                visit(digit, beam.ScoreOf(logit) + noise.Gumbel(child));
              });
  };
  double most = -INFINITY;
  each([&](int32_t, double noisy) { most = fmax(most, noisy); });
  for (int by = 16; by > 0; by /= 2) most = fmax(most, __shfl_xor_sync(kAllLanes, most, by));
  float* const to = of_children + place * from.codes;
  const float top = of_beams[place];
  each([&](int32_t digit, double noisy) { to[digit] = GumbelRank(top, noisy, most) + 0.0f; });
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_RANKS_CUH_
