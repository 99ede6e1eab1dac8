// What a beam search keeps the best by: a rank of each beam, and of its children, none of which is
// above its beam's.
//
// ByScore: the rank is the score. The search finds the most probable items.
//
// ByGumbel: stochastic beam search (Kool, van Hoof and Welling, "Stochastic beams and where to find
// them", ICML 2019, algorithm 1). The search draws items without replacement, each next one by the
// probabilities of those that are left. A beam of rank G has children of scores s(c), the logs of
// their probabilities, and noise g(c) of a Gumbel distribution. With p(c) = s(c) + g(c) and Z the
// greatest p, child c has the rank
//
//   -log(exp(-G) - exp(-Z) + exp(-p(c)))
//
// which is a Gumbel variable about s(c) under the condition that the greatest of them is G. It is
// computed by the formula of the paper's appendix B.3, which loses no digits.

#ifndef GMETA_OPS_TRIE_HOST_RANKS_H_
#define GMETA_OPS_TRIE_HOST_RANKS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "ops/trie/host/siblings.h"
#include "ops/trie/noise.h"

namespace gmeta::trie {

class ByScore {
 public:
  explicit ByScore(const float* scores) : scores_(scores) {}
  float OfBeam(size_t beam) const { return scores_[beam]; }
  // `scores` are those of the siblings.
  const float* OfChildren(size_t, const Siblings&, const float* scores) const { return scores; }

 private:
  const float* const scores_;
};

class ByGumbel {
 public:
  ByGumbel(const float* ranks, const Noise& noise) : ranks_(ranks), noise_(noise) {}
  float OfBeam(size_t beam) const { return ranks_[beam]; }

  const float* OfChildren(size_t beam, const Siblings& siblings, const float* scores) {
    const size_t n = siblings.count();
    noisy_.resize(n), of_children_.resize(n);
    double most = -INFINITY;
    for (size_t i = 0; i < n; ++i) {
      noisy_[i] = scores[i] + noise_.Gumbel(siblings.child(i));
      most = std::max(most, noisy_[i]);
    }
    const double top = ranks_[beam];
    for (size_t i = 0; i < n; ++i) {
      // The beam's rank is minus infinity, or no score is above that: so is each child's rank.
      const double v = top - noisy_[i] + Log1MinusExp(noisy_[i] - most);
      const double rank = top - std::max(0.0, v) - std::log1p(std::exp(-std::abs(v)));
      of_children_[i] = most > -INFINITY ? static_cast<float>(std::min(rank, top)) : -INFINITY;
    }
    return of_children_.data();
  }

 private:
  // log(1 - exp(x)), x <= 0.
  static double Log1MinusExp(double x) {
    return x > -0.69314718055994531 ? std::log(-std::expm1(x)) : std::log1p(-std::exp(x));
  }

  const float* const ranks_;
  Noise noise_;
  std::vector<double> noisy_;
  std::vector<float> of_children_;
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_RANKS_H_
