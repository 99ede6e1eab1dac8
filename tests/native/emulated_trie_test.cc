// Searches in tries on an emulated GPU (emulated_gpu/emulation.h): the CUDA sources as they stand,
// by their C interface, against the CPU's code.

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "device_memory.h"
#include "ops/common/gpu/cuda_error.cu"
#include "ops/trie/gpu/trie.cu"
#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/log_probs.h"
#include "tests/native/check.h"
#include "tests/native/random_trie_level.h"

namespace {

using std::vector;

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t users, beams, k, nodes;
  int32_t codes;
  uint32_t one_of;  // codes is a child
  bool alike;       // scores and logits are of few values, so that ranks tie
};

bool AreClose(float a, float b) { return a == b || std::abs(a - b) < 1e-5f * (1 + std::abs(b)); }

void CheckStep(const Shape& shape, uint32_t seed) {
  emulated::settings.seed = seed;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  const RandomLevel level(shape.nodes, shape.codes, shape.one_of, seed % 2 == 0, &random);
  const size_t beams = static_cast<size_t>(shape.users * shape.beams);
  vector<float> logits(beams * static_cast<size_t>(shape.codes)), scores(beams);
  vector<int64_t> nodes(beams);
  for (float& z : logits) z = shape.alike ? (random() % 4 == 0 ? kNone : 0.0f) : normal(random);
  for (size_t i = 0; i < beams; ++i) {
    scores[i] = shape.alike ? -static_cast<float>(random() % 2) : normal(random);
    nodes[i] = random() % 6 == 0 ? -1 : static_cast<int64_t>(random() % shape.nodes);
  }
  const size_t out = static_cast<size_t>(shape.users * shape.k);
  vector<float> found_scores(out, 7.0f), expected_scores(out);
  vector<int64_t> found(out, 7), expected(out);
  vector<int32_t> found_beams(out, 7), expected_beams(out);
  const GmetaTrieLevel on_gpu = level.OnGpu();
  CHECK_EQ(gmeta_gpu_trie_step(logits.data(), scores.data(), nodes.data(), shape.users, shape.beams,
                               shape.codes, &on_gpu, shape.k, found_scores.data(), found.data(),
                               found_beams.data(), nullptr),
           0);
  gmeta::trie::BeamStep step(static_cast<size_t>(shape.k));
  for (int64_t user = 0; user < shape.users; ++user) {
    const int64_t at = user * shape.beams, to = user * shape.k;
    const auto outcome =
        step.Run(level.OnCpu(),
                 {&logits[static_cast<size_t>(at * shape.codes)], &scores[static_cast<size_t>(at)],
                  &nodes[static_cast<size_t>(at)], static_cast<size_t>(shape.beams),
                  static_cast<size_t>(shape.codes)},
                 gmeta::trie::ByScore(&scores[static_cast<size_t>(at)]),
                 {expected_scores.data() + to, expected.data() + to, expected_beams.data() + to});
    CHECK(outcome.problem == gmeta::trie::Problem::kNone);
  }
  for (size_t i = 0; i < out; ++i) CHECK(AreClose(found_scores[i], expected_scores[i]));
  CHECK(found == expected);
  CHECK(found_beams == expected_beams);
}

// What is wrong with one user's input, and is told in that user's results.
void CheckWrongSteps() {
  const int64_t starts[] = {0, 2, 4};
  const int32_t digits[] = {0, 1, 0, 2};
  const auto run = [&](const vector<int64_t>& nodes, const vector<float>& scores,
                       const vector<float>& logits, int64_t last, int32_t digit) {
    const int64_t moved[] = {0, 2, last};
    const int32_t replaced[] = {0, 1, 0, digit};
    const GmetaTrieLevel level{moved, replaced, nullptr, 2, 4, nullptr};
    float next_scores[4];
    int64_t next[4];
    int32_t from[4];
    CHECK_EQ(gmeta_gpu_trie_step(logits.data(), scores.data(), nodes.data(), 2, 1, 3, &level, 2,
                                 next_scores, next, from, nullptr),
             0);
    CHECK(std::abs(next_scores[0] + std::log(2.0f)) < 1e-6f);  // user 0 is well
    CHECK(next[0] >= 0 && next[1] >= 0);
    for (int i = 2; i < 4; ++i) {
      CHECK(std::isnan(next_scores[i]));
      CHECK_EQ(next[i], -1);
      CHECK_EQ(from[i], -1);
    }
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const vector<float> fine{0, 0, 0, 0, 0, 0};
  run({0, 2}, {0, 0}, fine, 4, 2);
  run({0, 1}, {0, nan}, fine, 4, 2);
  run({0, 1}, {0, 0}, {0, 0, 0, 0, 0, nan}, 4, 2);
  run({0, 1}, {0, 0}, {0, 0, 0, 0, 0, -kNone}, 4, 2);
  run({0, 1}, {0, 0}, fine, 5, 2);
  run({0, 1}, {0, 0}, fine, 4, 3);
  run({0, 1}, {0, 0}, fine, 4, -1);
  const GmetaTrieLevel level{starts, digits, nullptr, 2, 4, nullptr};
  CHECK_EQ(gmeta_gpu_trie_step(nullptr, nullptr, nullptr, 1, 1, 3, &level, kMostBeams + 1, nullptr,
                               nullptr, nullptr, nullptr),
           static_cast<int>(GMETA_CUDA_UNSUPPORTED));
}

void CheckLogProbs(uint32_t seed) {
  emulated::settings.seed = seed;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  constexpr int32_t kCodes = 70;
  const RandomLevel level(9, kCodes, 2, seed % 2 == 0, &random);
  const size_t n = random() % 20;
  vector<float> logits(n * kCodes), upstream(n), found(n, 7.0f), gradient(n * kCodes, 7.0f);
  vector<int64_t> nodes(n), children(n);
  for (float& z : logits) z = random() % 9 == 0 ? kNone : normal(random);
  for (size_t i = 0; i < n; ++i) {
    upstream[i] = normal(random);
    nodes[i] = static_cast<int64_t>(random() % 10) - 1;
    children[i] = -1;
    if (nodes[i] < 0 || random() % 5 == 0) continue;
    const int64_t first = level.starts[nodes[i]], count = level.starts[nodes[i] + 1] - first;
    children[i] = first + static_cast<int64_t>(random() % (count + 1));  // perhaps the next node's
  }
  const GmetaTrieLevel on_gpu = level.OnGpu();
  const int64_t rows = static_cast<int64_t>(n);
  CHECK_EQ(gmeta_gpu_trie_log_probs(logits.data(), nodes.data(), children.data(), rows, kCodes,
                                    &on_gpu, found.data(), nullptr),
           0);
  CHECK_EQ(gmeta_gpu_trie_log_probs_gradient(upstream.data(), logits.data(), nodes.data(),
                                             children.data(), rows, kCodes, &on_gpu,
                                             gradient.data(), nullptr),
           0);
  const gmeta::trie::Rows on_cpu{logits.data(), nodes.data(), children.data(), kCodes};
  gmeta::trie::Siblings siblings;
  for (size_t i = 0; i < n; ++i) {
    float y;
    vector<float> expected(kCodes);
    const auto problem = gmeta::trie::LogProb(level.OnCpu(), on_cpu, i, &siblings, &y);
    CHECK(problem == gmeta::trie::LogProbGradient(level.OnCpu(), on_cpu, i, upstream[i], &siblings,
                                                  expected.data()));
    const bool wrong = problem != gmeta::trie::Problem::kNone;
    CHECK(wrong ? std::isnan(found[i]) : AreClose(found[i], y));
    for (size_t j = 0; j < kCodes; ++j) {
      const float here = gradient[i * kCodes + j];
      CHECK(wrong ? std::isnan(here) : std::abs(here - expected[j]) < 1e-5f);
    }
  }
}

}  // namespace

int main() {
  CheckStep({3, 1, 7, 1, 60, 1, false}, 1);     // the first step: more children than are kept
  CheckStep({2, 5, 200, 9, 40, 3, false}, 2);   // fewer children than are kept
  CheckStep({2, 40, 30, 50, 64, 2, false}, 3);  // more beams than warps
  CheckStep({2, 40, 30, 50, 64, 2, false}, 4);
  CheckStep({2, 40, 100, 3, 50, 1, true}, 5);  // ties of beams at one node
  CheckStep({2, 40, 100, 3, 50, 1, true}, 6);
  CheckStep({2, 0, 3, 3, 5, 1, false}, 7);  // no beams
  CheckStep({0, 3, 3, 3, 5, 1, false}, 8);
  CheckWrongSteps();
  for (uint32_t seed = 0; seed < 30; ++seed) CheckLogProbs(seed);
}
