// A step of a beam search against sorts over all children, the probabilities of siblings against
// sums in double precision, and the gradient of their logs.

#include "ops/trie/host/beam_step.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "ops/common/splitmix.h"
#include "ops/trie/host/log_probs.h"
#include "tests/native/check.h"

using gmeta::SplitMix64;
using gmeta::trie::BeamStep;
using gmeta::trie::ByScore;
using gmeta::trie::Level;
using gmeta::trie::Problem;
using gmeta::trie::Siblings;

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Checks probabilities against sums in double precision, child by child.
void CheckSiblings(const Level& level, int64_t node, const float* logits,
                   const Siblings& siblings) {
  double sum = 0.0, total = 0.0;
  std::vector<int64_t> there;
  for (int64_t c = level.starts[node]; c < level.starts[node + 1]; ++c) {
    if (level.allowed != nullptr && !level.allowed[c]) continue;
    there.push_back(c);
    sum += std::exp(static_cast<double>(logits[level.digits[c]]));
  }
  CHECK_EQ(siblings.count(), sum == 0.0 ? 0 : there.size());
  if (sum == 0.0) return;
  for (size_t i = 0; i < there.size(); ++i) {
    CHECK_EQ(siblings.child(i), there[i]);
    CHECK_EQ(siblings.digit(i), level.digits[there[i]]);
    const double expected = logits[siblings.digit(i)] - std::log(sum);
    const double found = siblings.log_prob(i);
    CHECK(found == expected || std::abs(found - expected) < 2e-6 * (1.0 + std::abs(expected)));
    total += siblings.weight(i) / siblings.sum();
  }
  CHECK(std::abs(total - 1.0) < 1e-6);
}

// Rows of many children, whose logits lie far apart, against the same sums.
void TestWideNodes(uint32_t seed) {
  std::mt19937 random(seed);
  const int32_t children = static_cast<int32_t>(random() % 300 + 1);
  std::normal_distribution<float> normal(0.0f, seed % 2 == 0 ? 1.0f : 40.0f);
  std::vector<float> logits(400);
  for (float& z : logits) z = normal(random);
  std::vector<int32_t> digits(400);
  std::iota(digits.begin(), digits.end(), 0);
  std::shuffle(digits.begin(), digits.end(), random);
  const int64_t starts[] = {0, children};
  const Level level{starts, digits.data(), nullptr, 1, children};
  Siblings siblings;
  CHECK(siblings.Read(level, 0, logits.data(), logits.size()) == Problem::kNone);
  CheckSiblings(level, 0, logits.data(), siblings);
  if (children == 1) CHECK_EQ(siblings.log_prob(0), 0.0f);
}

// A gradient against differences of log-probabilities.
void TestGradient(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  const int64_t starts[] = {0, 4, 9};
  const int32_t digits[] = {0, 2, 3, 6, 0, 1, 2, 5, 6};
  const bool allowed[] = {true, false, true, true, true, true, false, true, true};
  const Level level{starts, digits, seed % 2 == 0 ? nullptr : allowed, 2, 9};
  const int64_t nodes[] = {1, 0}, children[] = {seed % 3 == 0 ? 8 : 5, -1};
  std::vector<float> logits(14), found(14, 7.0f);
  for (float& z : logits) z = normal(random);
  Siblings siblings;
  for (size_t row = 0; row < 2; ++row) {
    const gmeta::trie::Rows rows{logits.data(), nodes, children, 7};
    CHECK(gmeta::trie::LogProbGradient(level, rows, row, 3.0f, &siblings, &found[7 * row]) ==
          Problem::kNone);
    for (size_t i = 0; i < 7; ++i) {
      float ends[2];
      for (int side = 0; side < 2; ++side) {
        std::vector<float> moved = logits;
        moved[7 * row + i] += side == 0 ? -0.01f : 0.01f;
        const gmeta::trie::Rows there{moved.data(), nodes, children, 7};
        CHECK(gmeta::trie::LogProb(level, there, row, &siblings, &ends[side]) == Problem::kNone);
      }
      CHECK(std::abs(found[7 * row + i] - 3.0f * (ends[1] - ends[0]) / 0.02f) < 2e-3f);
    }
  }
}

void TestAgainstAllChildren(uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t nodes = random() % 20 + 1;
  const size_t codes = random() % 12 + 1, beams = random() % 8 + 1, k = random() % 20 + 1;
  std::vector<int64_t> starts{0};
  std::vector<int32_t> digits;
  for (int64_t i = 0; i < nodes; ++i) {
    for (size_t code = 0; code < codes; ++code) {
      if (random() % 3 == 0) digits.push_back(static_cast<int32_t>(code));
    }
    starts.push_back(static_cast<int64_t>(digits.size()));
  }
  const size_t children = digits.size();
  const std::unique_ptr<bool[]> allowed(new bool[children + 1]);
  for (size_t i = 0; i < children; ++i) allowed[i] = random() % 4 != 0;
  const bool masks = random() % 2 == 0;
  std::vector<float> logits(beams * codes), scores(beams);
  std::vector<int64_t> at(beams);
  // Few values, so that scores are often equal; some are impossible.
  for (float& z : logits) z = random() % 9 == 0 ? kNone : static_cast<float>(random() % 3);
  for (size_t i = 0; i < beams; ++i) {
    scores[i] = -static_cast<float>(random() % 3);
    at[i] = random() % 5 == 0 ? -1 : static_cast<int64_t>(random() % nodes);
  }

  Level level{starts.data(), digits.data(), masks ? allowed.get() : nullptr, nodes,
              static_cast<int64_t>(children)};
  const std::vector<int64_t> wide_digits(digits.begin(), digits.end());
  using Expected = std::tuple<float, uint64_t, int64_t, int64_t>;
  std::vector<Expected> all;
  Siblings siblings;
  for (size_t i = 0; i < beams; ++i) {
    if (at[i] < 0) continue;
    CHECK(siblings.Read(level, at[i], logits.data() + i * codes, codes) == Problem::kNone);
    CheckSiblings(level, at[i], logits.data() + i * codes, siblings);
    for (size_t j = 0; j < siblings.count(); ++j) {
      const int64_t c = siblings.child(j);
      const float score = scores[i] + siblings.log_prob(j);
      all.push_back({-score, SplitMix64(static_cast<uint64_t>(c)), static_cast<int64_t>(i), c});
    }
  }
  std::sort(all.begin(), all.end());

  std::vector<float> next_scores(k, 7.0f);
  std::vector<int64_t> next(k, 7);
  std::vector<int32_t> from(k, 7);
  BeamStep step(k);
  for (int again = 0; again < 2; ++again) {
    if (again == 1) level.digits = nullptr, level.wide_digits = wide_digits.data();
    CHECK(step.Run(level, {logits.data(), scores.data(), at.data(), beams, codes},
                   ByScore(scores.data()), {next_scores.data(), next.data(), from.data()})
              .problem == Problem::kNone);
    for (size_t i = 0; i < k; ++i) {
      const bool there = i < all.size();
      CHECK_EQ(next[i], there ? std::get<3>(all[i]) : int64_t{-1});
      CHECK_EQ(from[i], there ? static_cast<int32_t>(std::get<2>(all[i])) : -1);
      CHECK_EQ(next_scores[i], there ? -std::get<0>(all[i]) : kNone);
    }
  }
}

void TestNotANumberIsTold() {
  const int64_t starts[] = {0, 1, 2};
  const int32_t digits[] = {1, 0};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float logits[] = {nan, 1.0f, nan, 1.0f}, scores[] = {0.0f, 0.0f};
  const int64_t nodes[] = {0, 1};
  float next_scores[2];
  int64_t next[2];
  int32_t from[2];
  BeamStep step(2);
  // The first beam's only child doesn't read its NaN; the second's does.
  const BeamStep::Outcome outcome =
      step.Run({starts, digits, nullptr, 2, 2}, {logits, scores, nodes, 2, 2}, ByScore(scores),
               {next_scores, next, from});
  CHECK(outcome.problem == Problem::kLogit);
  CHECK_EQ(outcome.beam, size_t{1});
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 3000; ++seed) TestAgainstAllChildren(seed);
  for (uint32_t seed = 0; seed < 1000; ++seed) TestWideNodes(seed), TestGradient(seed);
  TestNotANumberIsTold();
}
