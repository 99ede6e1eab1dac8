// Siblings: the allowed children of one node, their logits, and the log of the sum of their
// exponentials. The step of a beam search and the log of a code's probability are both based on it.
//
// What it computes
//   With logits z, child c of node i has the probability
//
//     exp(z[digits[c]]) / sum of exp(z[digits[c']]) over the allowed children c' of i
//
//   The greatest logit is subtracted from all. What is below e^-87 of the most probable child then
//   counts as zero. Exponentials (ops/trie/weights.h) are right to 2 units in the last place, and
//   are added in 16 sums, which are folded at the end: the same bits on each machine.
//
// Why it is fast
//   No digit is searched for and no mask of all codes is made: a node reads its own children, 8
//   bytes each. They are gathered once into a row, on which all else runs in vectors. A node with
//   one child, as most have near a trie's leaves, needs neither exponential nor logarithm.

#ifndef GMETA_OPS_TRIE_HOST_SIBLINGS_H_
#define GMETA_OPS_TRIE_HOST_SIBLINGS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/attention/host/vector.h"
#include "ops/common/vector_target.h"
#include "ops/trie/level.h"
#include "ops/trie/weights.h"

namespace gmeta::trie {

// What is wrong with an input.
enum class Problem {
  kNone,
  kScore,      // of a beam: NaN
  kNode,       // isn't of the level
  kChildren,   // of a node: the level has no such
  kDigit,      // of a child: there is no such logit
  kLogit,      // of a child: NaN or infinity
  kChild,      // isn't one of the node's
  kForbidden,  // is one, but isn't allowed
};

inline constexpr size_t kLanes = 16;
using Lanes = hstu::Floats<kLanes>;

// Whether any digit was out of range, and any logit NaN or infinity.
struct Gathered {
  bool wrong_digits, wrong_logits;
};

// Copies the logits of n digits, then minus infinity to a whole number of lanes.
GMETA_ALWAYS_INLINE void GatherLanes(const float* __restrict logits, uint32_t codes,
                                     const int32_t* __restrict digits, size_t n,
                                     float* __restrict to, Gathered* __restrict found) {
  uint32_t most = 0, wrong_logits = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t digit = static_cast<uint32_t>(digits[i]);
    most = digit > most ? digit : most;
  }
  *found = {most >= codes, false};
  if (most >= codes) return;
  for (size_t i = 0; i < n; ++i) to[i] = logits[digits[i]];
  for (size_t i = 0; i < n; ++i) {
    wrong_logits |= to[i] < std::numeric_limits<float>::infinity() ? 0u : 1u;
  }
  found->wrong_logits = wrong_logits != 0;
  for (size_t i = n; i % kLanes != 0; ++i) to[i] = -std::numeric_limits<float>::infinity();
}
GMETA_VECTOR_VERSIONS(Gather, GatherLanes,
                      (const float* logits, uint32_t codes, const int32_t* digits, size_t n,
                       float* to, Gathered* found),
                      (logits, codes, digits, n, to, found))

// Writes exp(x - most) to `weights`, and gives the greatest x and the sum.
GMETA_ALWAYS_INLINE void WeighLanes(const float* x, size_t n, float* weights, float* greatest,
                                    float* total) {
  Lanes most = hstu::Load<kLanes>(x);
  for (size_t i = kLanes; i < n; i += kLanes) {
    const Lanes here = hstu::Load<kLanes>(x + i);
    most = here > most ? here : most;
  }
  float top = most[0];
  for (size_t lane = 1; lane < kLanes; ++lane) top = most[lane] > top ? most[lane] : top;
  *greatest = top;
  *total = 0.0f;
  if (top == -std::numeric_limits<float>::infinity()) return;
  Lanes sums{};
  for (size_t i = 0; i < n; i += kLanes) {
    const Lanes below = hstu::Load<kLanes>(x + i) - top;
    const Lanes weight = below < kFar ? Lanes{} : hstu::Exp<kLanes>(below);
    hstu::Store<kLanes>(weights + i, weight);
    sums += weight;
  }
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  *total = sums[0];
}
GMETA_VECTOR_VERSIONS(Weigh, WeighLanes,
                      (const float* x, size_t n, float* weights, float* greatest, float* total),
                      (x, n, weights, greatest, total))

// Writes score + ((x - most) - log_sum) for whole lanes of x.
GMETA_ALWAYS_INLINE void ScoreLanes(const float* x, size_t n, float most, float log_sum,
                                    float score, float* to) {
  for (size_t i = 0; i < n; i += kLanes) {
    hstu::Store<kLanes>(to + i, score + ((hstu::Load<kLanes>(x + i) - most) - log_sum));
  }
}
GMETA_VECTOR_VERSIONS(Score, ScoreLanes,
                      (const float* x, size_t n, float most, float log_sum, float score, float* to),
                      (x, n, most, log_sum, score, to))

class Siblings {
 public:
  // Reads the children of a node. `logits` are those of all codes.
  Problem Read(const Level& level, int64_t node, const float* logits, size_t codes) {
    count_ = 0;
    if (node < 0 || node >= level.nodes) return Problem::kNode;
    first_ = level.starts[node];
    const int64_t last = level.starts[node + 1];
    if (first_ < 0 || last < first_ || last > level.children) return Problem::kChildren;
    size_t n = static_cast<size_t>(last - first_);
    const int32_t* digits = level.digits == nullptr ? nullptr : level.digits + first_;
    if (n > places_.size()) Grow(n);
    masked_ = level.allowed != nullptr;
    if (masked_) {
      size_t kept = 0;
      for (size_t i = 0; i < n; ++i) {
        places_[kept] = static_cast<uint32_t>(i);
        kept_digits_[kept] = level.Digit(first_ + static_cast<int64_t>(i));
        kept += level.allowed[first_ + static_cast<int64_t>(i)] ? 1 : 0;
      }
      n = kept;
      digits = kept_digits_.data();
    } else if (level.wide_digits != nullptr) {
      for (size_t i = 0; i < n; ++i) {
        kept_digits_[i] = level.Digit(first_ + static_cast<int64_t>(i));
      }
      digits = kept_digits_.data();
    }
    digits_ = digits;
    if (n == 0) return Problem::kNone;
    if (codes == 0) return Problem::kDigit;
    if (n == 1) {
      if (static_cast<uint32_t>(digits[0]) >= codes) return Problem::kDigit;
      most_ = logits_[0] = logits[digits[0]];
      if (!(most_ < std::numeric_limits<float>::infinity())) return Problem::kLogit;
      weights_[0] = sum_ = 1.0f;
      log_sum_ = 0.0f;
    } else {
      Gathered found;
      Gather(logits, static_cast<uint32_t>(codes), digits, n, logits_.data(), &found);
      if (found.wrong_digits) return Problem::kDigit;
      if (found.wrong_logits) return Problem::kLogit;
      Weigh(logits_.data(), n, weights_.data(), &most_, &sum_);
      log_sum_ = LogOfSum(sum_);
    }
    if (most_ > -std::numeric_limits<float>::infinity()) count_ = n;
    return Problem::kNone;
  }

  // How many there are; none, if none has a chance.
  size_t count() const { return count_; }
  int64_t child(size_t i) const {
    return first_ + static_cast<int64_t>(masked_ ? places_[i] : static_cast<uint32_t>(i));
  }
  int32_t digit(size_t i) const { return digits_[i]; }
  // The log of its probability, which is weight(i) / sum().
  float log_prob(size_t i) const { return log_prob_of(logits_[i]); }
  // The greatest of these.
  float best_log_prob() const { return log_prob_of(most_); }
  // Sets (*to)[i] to score + log_prob(i). It has whole lanes of kLanes numbers.
  void AddLogProbs(float score, std::vector<float>* to) const {
    if (to->size() < logits_.size()) to->resize(logits_.size());
    if (count_ == 1) {
      (*to)[0] = score;
    } else {
      Score(logits_.data(), count_, most_, log_sum_, score, to->data());
    }
  }
  float weight(size_t i) const { return weights_[i]; }
  float sum() const { return sum_; }
  // The same of the one that has this logit. Two subtractions, because the first is of alike
  // numbers.
  float log_prob_of(float logit) const { return (logit - most_) - log_sum_; }

 private:
  void Grow(size_t n) {
    const size_t room = (n + kLanes - 1) / kLanes * kLanes;
    places_.resize(room), kept_digits_.resize(room);
    logits_.resize(room), weights_.resize(room);
  }

  int64_t first_ = 0;
  size_t count_ = 0;
  bool masked_ = false;
  float most_ = 0.0f, sum_ = 0.0f, log_sum_ = 0.0f;
  const int32_t* digits_ = nullptr;
  std::vector<uint32_t> places_;  // of those that are allowed
  std::vector<int32_t> kept_digits_;
  std::vector<float> logits_, weights_;
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_SIBLINGS_H_
