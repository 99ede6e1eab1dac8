// BeamStep: one step of a beam search over a trie (ops/trie/level.h), for one user.
//
// What it computes
//   For a beam at node i with score s and logits z, child c has the score
//
//     s + z[digits[c]] - log sum of exp(z[digits[c']]) over the allowed children c' of i
//
//   So the probabilities of a node's children sum to its own, and those of all items to one. The k
//   children of the highest rank (ranks.h) are the next beams, the best first. Equal ranks are
//   ordered by SplitMix64 of the node, the smaller first, and those of one node by the beam.
//
// Why it is fast
//   Beams go by their ranks, the best first. As no child's rank is above its beam's, the step ends
//   with the first beam whose rank is below the k-th child's. The rows that a user's beams need,
//   which may be anywhere in a large trie, are prefetched before the first is read. Children that
//   may be among the k best (best.h) are found in vectors; few are, once there are k.

#ifndef GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
#define GMETA_OPS_TRIE_HOST_BEAM_STEP_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/trie/host/best.h"
#include "ops/trie/host/ranks.h"
#include "ops/trie/host/siblings.h"
#include "ops/trie/level.h"

namespace gmeta::trie {

// Lists the numbers of x, of whole lanes, that are at least `least`.
GMETA_ALWAYS_INLINE void ListLanes(const float* x, size_t n, float least, uint32_t* list,
                                   size_t* listed) {
  size_t found = 0;
  for (size_t i = 0; i < n; i += kLanes) {
    const auto is_there = hstu::Load<kLanes>(x + i) >= least;
    int32_t any = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) any |= is_there[lane];
    if (any == 0) continue;
    for (size_t j = i; j < n && j < i + kLanes; ++j) {
      list[found] = static_cast<uint32_t>(j);
      found += x[j] >= least ? 1 : 0;
    }
  }
  *listed = found;
}
GMETA_VECTOR_VERSIONS(List, ListLanes,
                      (const float* x, size_t n, float least, uint32_t* list, size_t* listed),
                      (x, n, least, list, listed))

class BeamStep {
 public:
  // What is wrong, and with which beam.
  struct Outcome {
    Problem problem = Problem::kNone;
    size_t beam = 0;
  };

  explicit BeamStep(size_t k) : k_(k), best_(k) {}

  template <class Ranks>
  Outcome Run(const Level& level, const Beams& from, Ranks ranks, const NextBeams& to) {
    for (size_t i = 0; i < from.beams; ++i) {
      if (from.nodes[i] >= level.nodes) return {Problem::kNode, i};
      if (from.nodes[i] < 0) continue;
      if (std::isnan(from.scores[i]) || std::isnan(ranks.OfBeam(i))) return {Problem::kScore, i};
      __builtin_prefetch(level.starts + from.nodes[i]);
    }
    best_.Clear();
    order_.clear();
    for (size_t i = 0; i < from.beams; ++i) {
      if (from.nodes[i] < 0) continue;
      order_.push_back(i);
      const int64_t first = level.starts[from.nodes[i]];
      if (first < 0 || first >= level.children) continue;  // Siblings report it
      if (level.wide_digits == nullptr) {
        __builtin_prefetch(level.digits + first);
      } else {
        __builtin_prefetch(level.wide_digits + first);
      }
      if (level.allowed != nullptr) __builtin_prefetch(level.allowed + first);
    }
    const auto is_before = [&](size_t a, size_t b) { return ranks.OfBeam(a) > ranks.OfBeam(b); };
    if (!std::is_sorted(order_.begin(), order_.end(), is_before)) {  // a step's beams are
      std::stable_sort(order_.begin(), order_.end(), is_before);
    }
    for (const size_t beam : order_) {
      if (ranks.OfBeam(beam) < best_.least()) break;
      const Problem problem =
          siblings_.Read(level, from.nodes[beam], from.logits + beam * from.codes, from.codes);
      if (problem != Problem::kNone) return {problem, beam};
      if (siblings_.count() == 0) continue;
      if (ranks.MostOfChildren(beam, from.scores[beam] + siblings_.best_log_prob()) <
          best_.least()) {
        continue;
      }
      siblings_.AddLogProbs(from.scores[beam], &scores_);
      Consider(ranks.OfChildren(beam, siblings_, scores_.data()), static_cast<int32_t>(beam));
    }
    best_.Finish();
    for (size_t i = 0; i < k_; ++i) {
      const bool there = i < best_.count();
      const Best::Child child = there ? best_.child(i) : Best::Child{};
      to.scores[i] = child.score;
      to.nodes[i] = child.node;
      to.beams[i] = child.beam;
      if (to.ranks != nullptr) to.ranks[i] = there ? best_.rank(i) : Best::kNone;
    }
    return {};
  }

 private:
  // Considers the siblings, children of a beam.
  void Consider(const float* ranks, int32_t beam) {
    const size_t n = siblings_.count();
    best_.Expect(n);
    if (n == 1) {
      best_.Add(ranks[0], {scores_[0], beam, siblings_.child(0)});
      return;
    }
    if (listed_.size() < n) listed_.resize(n);
    size_t listed;
    List(ranks, n, best_.least(), listed_.data(), &listed);
    for (size_t j = 0; j < listed; ++j) {
      const uint32_t i = listed_[j];
      best_.Add(ranks[i], {scores_[i], beam, siblings_.child(i)});
    }
  }

  const size_t k_;
  Siblings siblings_;
  Best best_;
  std::vector<size_t> order_;
  std::vector<float> scores_;     // of the siblings
  std::vector<uint32_t> listed_;  // numbers of siblings
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
