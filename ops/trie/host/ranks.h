// The ranks by which a beam search keeps the best: that of each beam, and of its children, none of
// which is above its beam's.
//
// ByScore: the rank is the score. The search finds the most probable items.
//
// ByGumbel: the rank is the score with noise (ops/trie/gumbel_rank.h). The search draws items
// without replacement.

#ifndef GMETA_OPS_TRIE_HOST_RANKS_H_
#define GMETA_OPS_TRIE_HOST_RANKS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "ops/trie/gumbel_rank.h"
#include "ops/trie/host/siblings.h"
#include "ops/trie/noise.h"

namespace gmeta::trie {

class ByScore {
 public:
  explicit ByScore(const float* scores) : scores_(scores) {}
  float OfBeam(size_t beam) const { return scores_[beam]; }
  // An upper bound of the children's ranks, `best` being the greatest of their scores.
  float MostOfChildren(size_t, float best) const { return best; }
  // `scores` are those of the siblings. Ranks have whole lanes of kLanes numbers, as these do.
  const float* OfChildren(size_t, const Siblings&, const float* scores) const { return scores; }

 private:
  const float* const scores_;
};

class ByGumbel {
 public:
  ByGumbel(const float* ranks, const Noise& noise) : ranks_(ranks), noise_(noise) {}
  float OfBeam(size_t beam) const { return ranks_[beam]; }
  float MostOfChildren(size_t beam, float) const { return ranks_[beam]; }

  const float* OfChildren(size_t beam, const Siblings& siblings, const float* scores) {
    const size_t n = siblings.count();
    noisy_.resize(n), of_children_.resize((n + kLanes - 1) / kLanes * kLanes);
    double most = -INFINITY;
    for (size_t i = 0; i < n; ++i) {
      noisy_[i] = scores[i] + noise_.Gumbel(siblings.child(i));
      most = std::max(most, noisy_[i]);
    }
    for (size_t i = 0; i < n; ++i) of_children_[i] = GumbelRank(ranks_[beam], noisy_[i], most);
    return of_children_.data();
  }

 private:
  const float* const ranks_;
  Noise noise_;
  std::vector<double> noisy_;
  std::vector<float> of_children_;
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_RANKS_H_
