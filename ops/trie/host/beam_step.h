// BeamStep: one step of a beam search over a trie, for one user.
//
// Layout
//   A level of the trie is two arrays (gmeta/core/data/code_trie.py): the children of node i are
//   the nodes starts[i] to starts[i + 1] - 1 of the next level, and digits[c] is the last digit of
//   child c. `allowed`, if given, says which children lead to an item that may come out. A beam is
//   a node and a score, the log of its probability.
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
//   No digit is looked for and no mask of all codes is made: a beam reads the logits of its own
//   children, 12 bytes a child. Beams go by their scores, the best first. As no child's score is
//   above its beam's, the step ends with the first beam whose score is below the k-th child's.

#ifndef GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
#define GMETA_OPS_TRIE_HOST_BEAM_STEP_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace gmeta::trie {

// A level: from `nodes` nodes to `children` of the next.
struct Level {
  const int64_t* starts;  // nodes + 1
  const int32_t* digits;
  const bool* allowed;  // or null
  int64_t nodes, children;
};

// The beams of a user: nodes below 0 are of no beam.
struct Beams {
  const float* logits;  // beams x codes
  const float* scores;
  const int64_t* nodes;
  size_t beams, codes;
};

// Where the next beams go, k each. If there are fewer, the last have node -1, beam -1 and a score
// of minus infinity.
struct NextBeams {
  float* scores;
  int64_t* nodes;
  int32_t* beams;
};

inline uint64_t SplitMix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class BeamStep {
 public:
  static constexpr size_t kFine = SIZE_MAX;

  explicit BeamStep(size_t k) : k_(k) { best_.reserve(k + 1); }

  // Returns kFine, or the number of a beam whose logits hold NaN where they are read.
  size_t Run(const Level& level, const Beams& from, const NextBeams& to) {
    best_.clear();
    order_.resize(from.beams);
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t a, size_t b) { return from.scores[a] > from.scores[b]; });
    for (const size_t beam : order_) {
      if (from.nodes[beam] < 0) continue;
      if (best_.size() == k_ && from.scores[beam] < best_.front().score) break;
      if (!Extend(level, from, beam)) return beam;
    }
    std::sort_heap(best_.begin(), best_.end(), Before);
    for (size_t i = 0; i < k_; ++i) {
      const Child child = i < best_.size() ? best_[i] : Child{};
      to.scores[i] = child.score;
      to.nodes[i] = child.node;
      to.beams[i] = child.beam;
    }
    return kFine;
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

  // Considers the children of a beam.
  bool Extend(const Level& level, const Beams& from, size_t beam) {
    const float* const logits = from.logits + beam * from.codes;
    const int64_t node = from.nodes[beam];
    const int64_t first = level.starts[node], last = level.starts[node + 1];
    const auto may = [&](int64_t child) {
      return level.allowed == nullptr || level.allowed[child];
    };
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t child = first; child < last; ++child) {
      if (!may(child)) continue;
      const float logit = logits[level.digits[child]];
      if (std::isnan(logit)) return false;
      most = std::max(most, logit);
    }
    if (most == -std::numeric_limits<float>::infinity()) return true;  // no child, or none possible
    double sum = 0.0;
    for (int64_t child = first; child < last; ++child) {
      if (may(child)) sum += std::exp(logits[level.digits[child]] - most);
    }
    const float whole = most + static_cast<float>(std::log(sum));
    for (int64_t child = first; child < last; ++child) {
      if (!may(child)) continue;
      const float score = from.scores[beam] + (logits[level.digits[child]] - whole);
      if (best_.size() == k_ && score < best_.front().score) continue;
      const Child found{score, child, static_cast<int32_t>(beam),
                        SplitMix64(static_cast<uint64_t>(child))};
      if (best_.size() == k_) {
        if (!Before(found, best_.front())) continue;
        std::pop_heap(best_.begin(), best_.end(), Before);
        best_.pop_back();
      }
      best_.push_back(found);
      std::push_heap(best_.begin(), best_.end(), Before);
    }
    return true;
  }

  const size_t k_;
  std::vector<Child> best_;  // a heap, the last of them in front
  std::vector<size_t> order_;
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_BEAM_STEP_H_
