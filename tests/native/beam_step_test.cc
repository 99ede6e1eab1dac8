// A step of a beam search against sums and sorts over all children.

#include "ops/trie/host/beam_step.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "tests/native/check.h"

using gmeta::trie::BeamStep;
using gmeta::trie::SplitMix64;

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

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

  using Expected = std::tuple<float, uint64_t, int64_t, int64_t>;
  std::vector<Expected> all;
  for (size_t i = 0; i < beams; ++i) {
    if (at[i] < 0) continue;
    float most = kNone;
    double sum = 0.0;
    const auto each = [&](const auto& visit) {
      for (int64_t c = starts[at[i]]; c < starts[at[i] + 1]; ++c) {
        if (!masks || allowed[c]) visit(c, logits[i * codes + digits[c]]);
      }
    };
    each([&](int64_t, float z) { most = std::max(most, z); });
    if (most == kNone) continue;
    each([&](int64_t, float z) { sum += std::exp(z - most); });
    const float whole = most + static_cast<float>(std::log(sum));
    double total = 0.0;
    each([&](int64_t c, float z) {
      const float score = scores[i] + (z - whole);
      total += std::exp(score - scores[i]);
      all.push_back({-score, SplitMix64(static_cast<uint64_t>(c)), static_cast<int64_t>(i), c});
    });
    CHECK(std::abs(total - 1.0) < 1e-5);
  }
  std::sort(all.begin(), all.end());

  std::vector<float> next_scores(k, 7.0f);
  std::vector<int64_t> next(k, 7);
  std::vector<int32_t> from(k, 7);
  BeamStep step(k);
  for (int again = 0; again < 2; ++again) {
    CHECK_EQ(step.Run({starts.data(), digits.data(), masks ? allowed.get() : nullptr, nodes,
                       static_cast<int64_t>(children)},
                      {logits.data(), scores.data(), at.data(), beams, codes},
                      {next_scores.data(), next.data(), from.data()}),
             BeamStep::kFine);
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
  CHECK_EQ(step.Run({starts, digits, nullptr, 2, 2}, {logits, scores, nodes, 2, 2},
                    {next_scores, next, from}),
           size_t{1});
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 3000; ++seed) TestAgainstAllChildren(seed);
  TestNotANumberIsTold();
}
