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
//   which are anywhere in a large trie, are asked for before the first is read. Of a row, the
//   children that may be among the k best are listed without a branch; few are, once there are k.

#ifndef GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
#define GMETA_OPS_TRIE_HOST_BEAM_STEP_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/trie/host/ranks.h"
#include "ops/trie/host/siblings.h"
#include "ops/trie/level.h"

namespace gmeta::trie {

class BeamStep {
 public:
  // What is wrong, and with which beam.
  struct Outcome {
    Problem problem = Problem::kNone;
    size_t beam = 0;
  };

  explicit BeamStep(size_t k) : k_(k) { best_.reserve(k + 1); }

  template <class Ranks>
  Outcome Run(const Level& level, const Beams& from, Ranks ranks, const NextBeams& to) {
    for (size_t i = 0; i < from.beams; ++i) {
      if (from.nodes[i] >= level.nodes) return {Problem::kNode, i};
      if (from.nodes[i] < 0) continue;
      if (std::isnan(from.scores[i]) || std::isnan(ranks.OfBeam(i))) return {Problem::kScore, i};
      __builtin_prefetch(level.starts + from.nodes[i]);
    }
    best_.clear();
    order_.clear();
    for (size_t i = 0; i < from.beams; ++i) {
      if (from.nodes[i] < 0) continue;
      order_.push_back(i);
      const int64_t first = level.starts[from.nodes[i]];
      if (first < 0 || first >= level.children) continue;  // Siblings tell
      __builtin_prefetch(level.digits + first);
      if (level.allowed != nullptr) __builtin_prefetch(level.allowed + first);
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t a, size_t b) { return ranks.OfBeam(a) > ranks.OfBeam(b); });
    for (const size_t beam : order_) {
      if (ranks.OfBeam(beam) < Least()) break;
      const Problem problem =
          siblings_.Read(level, from.nodes[beam], from.logits + beam * from.codes, from.codes);
      if (problem != Problem::kNone) return {problem, beam};
      siblings_.AddLogProbs(from.scores[beam], &scores_);
      Consider(ranks.OfChildren(beam, siblings_, scores_.data()), static_cast<int32_t>(beam));
    }
    std::sort_heap(best_.begin(), best_.end(), Before);
    for (size_t i = 0; i < k_; ++i) {
      const Child child = i < best_.size() ? best_[i] : Child{};
      to.scores[i] = child.score;
      to.nodes[i] = child.node;
      to.beams[i] = child.beam;
      if (to.ranks != nullptr) to.ranks[i] = child.rank;
    }
    return {};
  }

 private:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  struct Child {
    float rank = kNone, score = kNone;
    int64_t node = -1;
    int32_t beam = -1;
    uint64_t hash = 0;
  };

  static bool Before(const Child& a, const Child& b) {
    if (a.rank != b.rank) return a.rank > b.rank;
    return a.hash != b.hash ? a.hash < b.hash : a.beam < b.beam;
  }

  // Below this rank no child is among the k best.
  float Least() const { return best_.size() == k_ ? best_.front().rank : kNone; }

  // Considers the siblings, children of a beam.
  void Consider(const float* ranks, int32_t beam) {
    const size_t n = siblings_.count();
    listed_.resize(std::max(listed_.size(), n));
    size_t listed = 0;
    const float least = Least();
    for (size_t i = 0; i < n; ++i) {
      listed_[listed] = static_cast<uint32_t>(i);
      listed += ranks[i] >= least ? 1 : 0;
    }
    for (size_t j = 0; j < listed; ++j) {
      const uint32_t i = listed_[j];
      if (ranks[i] < Least()) continue;
      const int64_t node = siblings_.child(i);
      const Child found{ranks[i], scores_[i], node, beam, SplitMix64(static_cast<uint64_t>(node))};
      if (best_.size() == k_) {
        if (!Before(found, best_.front())) continue;
        std::pop_heap(best_.begin(), best_.end(), Before);
        best_.pop_back();
      }
      best_.push_back(found);
      std::push_heap(best_.begin(), best_.end(), Before);
    }
  }

  const size_t k_;
  Siblings siblings_;
  std::vector<Child> best_;  // a heap, the last of them in front
  std::vector<size_t> order_;
  std::vector<float> scores_;     // of the siblings
  std::vector<uint32_t> listed_;  // numbers of siblings
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
