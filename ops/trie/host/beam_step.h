// BeamStep: one step of a beam search over a trie (ops/trie/level.h), for one user.
//
// What it computes
//   For a beam at node i with score s and logits z, child c has the score
//
//     s + z[digits[c]] - log sum of exp(z[digits[c']]) over the allowed children c' of i
//
//   So the probabilities of a node's children sum to its own, and those of all items to one. The k
//   best children of all beams are the next beams, the best first. Equal scores are ordered by
//   SplitMix64 of the node, the smaller first, and those of one node by the beam.
//
// Why it is fast
//   Beams go by their scores, the best first. As no child's score is above its beam's, the step
//   ends with the first beam whose score is below the k-th child's. The rows that a user's beams
//   need, which are anywhere in a large trie, are asked for before the first is read.

#ifndef GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
#define GMETA_OPS_TRIE_HOST_BEAM_STEP_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

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

  Outcome Run(const Level& level, const Beams& from, const NextBeams& to) {
    for (size_t i = 0; i < from.beams; ++i) {
      if (from.nodes[i] >= level.nodes) return {Problem::kNode, i};
      if (from.nodes[i] < 0) continue;
      if (std::isnan(from.scores[i])) return {Problem::kScore, i};
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
                     [&](size_t a, size_t b) { return from.scores[a] > from.scores[b]; });
    for (const size_t beam : order_) {
      if (best_.size() == k_ && from.scores[beam] < best_.front().score) break;
      const Problem problem =
          siblings_.Read(level, from.nodes[beam], from.logits + beam * from.codes, from.codes);
      if (problem != Problem::kNone) return {problem, beam};
      Consider(from.scores[beam], static_cast<int32_t>(beam));
    }
    std::sort_heap(best_.begin(), best_.end(), Before);
    for (size_t i = 0; i < k_; ++i) {
      const Child child = i < best_.size() ? best_[i] : Child{};
      to.scores[i] = child.score;
      to.nodes[i] = child.node;
      to.beams[i] = child.beam;
    }
    return {};
  }

 private:
  struct Child {
    float score = -std::numeric_limits<float>::infinity();
    int64_t node = -1;
    int32_t beam = -1;
    uint64_t hash = 0;
  };

  static bool Before(const Child& a, const Child& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.hash != b.hash ? a.hash < b.hash : a.beam < b.beam;
  }

  // Considers the siblings, children of a beam.
  void Consider(float score, int32_t beam) {
    for (size_t i = 0; i < siblings_.count(); ++i) {
      const float reached = score + siblings_.log_prob(i);
      if (best_.size() == k_ && reached < best_.front().score) continue;
      const int64_t child = siblings_.child(i);
      const Child found{reached, child, beam, SplitMix64(static_cast<uint64_t>(child))};
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
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
