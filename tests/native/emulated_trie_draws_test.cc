// Draws from tries on an emulated GPU (emulated_gpu/emulation.h) against the CPU's code, which
// gives the same bits: where the libraries' logarithms are the same, as here, nothing may differ.
// The build must not fuse multiplications and additions (-ffp-contract=off).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "device_memory.h"
#include "ops/attention/host/vector.h"
#include "ops/common/gpu/cuda_error.cu"
#include "ops/trie/gpu/trie.cu"
#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/ranks.h"
#include "ops/trie/host/sample.h"
#include "ops/trie/noise.h"
#include "ops/trie/weights.h"
#include "tests/native/check.h"
#include "tests/native/random_trie_level.h"

namespace {

using std::vector;

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Of either kind of draw.
struct Drawn {
  vector<float> scores, ranks;
  vector<int64_t> nodes;
  vector<int32_t> beams;

  explicit Drawn(int64_t n) : scores(n, 7.0f), ranks(n, 7.0f), nodes(n, 7), beams(n, 7) {}
  bool operator==(const Drawn& other) const {
    return scores == other.scores && ranks == other.ranks && nodes == other.nodes &&
           beams == other.beams;
  }
  gmeta::trie::NextBeams At(int64_t place) {
    return {scores.data() + place, nodes.data() + place, beams.data() + place,
            ranks.data() + place};
  }
};

struct Shape {
  int64_t users, beams, nodes;
  int32_t codes;
  uint32_t one_of;  // codes is a child
  float spread;     // of logits
};

// Beams at random nodes of a random level, with the noise of their users.
class Case {
 public:
  Case(const Shape& shape, uint32_t seed)
      : shape(shape),
        random_(seed),
        level(shape.nodes, shape.codes, shape.one_of, seed % 2 == 0, &random_) {
    emulated::settings.seed = seed;
    std::normal_distribution<float> normal;
    const size_t beams = static_cast<size_t>(shape.users * shape.beams);
    logits.resize(beams * static_cast<size_t>(shape.codes));
    for (float& z : logits) z = random_() % 9 == 0 ? kNone : shape.spread * normal(random_);
    for (size_t i = 0; i < beams; ++i) {
      scores.push_back(normal(random_) - 5.0f);
      ranks.push_back(random_() % 9 == 0 ? kNone : normal(random_));
      nodes.push_back(random_() % 6 == 0 ? -1 : static_cast<int64_t>(random_() % shape.nodes));
    }
    for (int64_t i = 0; i < shape.users; ++i) {
      keys.push_back(static_cast<int64_t>(uint64_t{random_()} << 32 | random_()));
    }
  }

  Drawn SampleOnGpu() {
    const GmetaTrieLevel on_gpu = level.OnGpu();
    const GmetaTrieNoise noise = NoiseOnGpu();
    Drawn to(shape.users * shape.beams);
    CHECK_EQ(gmeta_gpu_trie_sample(logits.data(), scores.data(), nodes.data(), shape.users,
                                   shape.beams, shape.codes, &on_gpu, &noise, to.scores.data(),
                                   to.nodes.data(), to.beams.data(), nullptr),
             0);
    return to;
  }
  Drawn SampleOnCpu() {
    Drawn to(shape.users * shape.beams);
    gmeta::trie::Siblings siblings;
    for (int64_t user = 0; user < shape.users; ++user) {
      const auto outcome = gmeta::trie::Sample(level.OnCpu(), BeamsOf(user), NoiseOf(user),
                                               &siblings, to.At(user * shape.beams));
      CHECK(outcome.problem == gmeta::trie::Problem::kNone);
    }
    return to;
  }

  Drawn StepOnGpu(int64_t k) {
    const GmetaTrieLevel on_gpu = level.OnGpu();
    const GmetaTrieNoise noise = NoiseOnGpu();
    Drawn to(shape.users * k);
    vector<float> scratch(logits.size(), kNan);
    CHECK_EQ(gmeta_gpu_trie_gumbel_step(logits.data(), scores.data(), ranks.data(), nodes.data(),
                                        shape.users, shape.beams, shape.codes, &on_gpu, &noise, k,
                                        scratch.data(), to.scores.data(), to.nodes.data(),
                                        to.beams.data(), to.ranks.data(), nullptr),
             0);
    return to;
  }
  Drawn StepOnCpu(int64_t k) {
    Drawn to(shape.users * k);
    gmeta::trie::BeamStep step(static_cast<size_t>(k));
    for (int64_t user = 0; user < shape.users; ++user) {
      const gmeta::trie::ByGumbel by(ranks.data() + user * shape.beams, NoiseOf(user));
      const auto outcome = step.Run(level.OnCpu(), BeamsOf(user), by, to.At(user * k));
      CHECK(outcome.problem == gmeta::trie::Problem::kNone);
    }
    return to;
  }

 private:
  gmeta::trie::Beams BeamsOf(int64_t user) const {
    const int64_t at = user * shape.beams;
    return {logits.data() + at * shape.codes, scores.data() + at, nodes.data() + at,
            static_cast<size_t>(shape.beams), static_cast<size_t>(shape.codes)};
  }
  gmeta::trie::Noise NoiseOf(int64_t user) const {
    return {static_cast<uint64_t>(seed), static_cast<uint64_t>(step), 3,
            static_cast<uint64_t>(keys[static_cast<size_t>(user)])};
  }
  GmetaTrieNoise NoiseOnGpu() const { return {&seed, &step, keys.data(), 3}; }

 public:
  const Shape shape;

 private:
  std::mt19937 random_;
  const int64_t seed = -77, step = int64_t{1} << 40;

 public:
  const RandomLevel level;
  vector<float> logits, scores, ranks;
  vector<int64_t> nodes, keys;
};

// All 2^16 floats below 0 that have 16 bits of zero at their end, and as many others.
void CheckWeightsHaveTheVectorsBits() {
  std::mt19937 random(1);
  for (uint32_t i = 0; i < 1u << 17; ++i) {
    const uint32_t bits = 1u << 31 | i << 15 | (random() & 0x7fff);
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    if (!(x >= gmeta::trie::kFar)) continue;
    const float here = gmeta::trie::Weight(x);
    const float there = gmeta::hstu::Exp<16>(gmeta::hstu::Broadcast<16>(x))[5];
    CHECK(std::memcmp(&here, &there, sizeof(here)) == 0);
    CHECK(std::abs(here - std::exp(static_cast<double>(x))) <= 3e-7 * here);
  }
}

// What is drawn below a number is below it, and spread evenly.
void CheckDrawsBelow() {
  int64_t counts[3] = {};
  for (uint64_t beam = 0; beam < 3000; ++beam) {
    const gmeta::trie::Noise noise(5, 6, 7, 8);
    CHECK_EQ(noise.Below(beam, 1), uint64_t{0});
    ++counts[noise.Below(beam, 3)];
    CHECK(noise.Below(beam, uint64_t{1} << 62) < uint64_t{1} << 62);
  }
  for (const int64_t count : counts) CHECK(std::abs(count - 1000) < 120);  // 4.6 deviations
}

void CheckWrongBeams() {
  const int64_t k = 5;
  for (int what = 0; what < 4; ++what) {
    Case wrong({3, 4, 9, 20, 1, 1.0f}, 2);
    wrong.nodes[6] = 3;  // of user 1
    const Drawn sampled = wrong.SampleOnGpu(), stepped = wrong.StepOnGpu(k);
    if (what == 0) wrong.nodes[6] = 9;
    if (what == 1) wrong.scores[6] = kNan;
    if (what == 2) std::fill_n(wrong.logits.begin() + 6 * 20, 20, kNan);
    if (what == 3) wrong.ranks[6] = kNan;
    const Drawn samples = wrong.SampleOnGpu(), steps = wrong.StepOnGpu(k);
    for (size_t i = 0; i < samples.nodes.size(); ++i) {
      if (i == 6 && what != 3) {
        CHECK(std::isnan(samples.scores[i]));
        CHECK(samples.nodes[i] == -1 && samples.beams[i] == -1);
      } else {
        CHECK(samples.scores[i] == sampled.scores[i] && samples.nodes[i] == sampled.nodes[i]);
      }
    }
    for (size_t i = 0; i < steps.nodes.size(); ++i) {
      if (static_cast<int64_t>(i) / k == 1) {
        CHECK(std::isnan(steps.scores[i]) && std::isnan(steps.ranks[i]));
        CHECK(steps.nodes[i] == -1 && steps.beams[i] == -1);
      } else {
        CHECK(steps.scores[i] == stepped.scores[i] && steps.nodes[i] == stepped.nodes[i]);
      }
    }
  }
  const GmetaTrieLevel level{nullptr, nullptr, nullptr, 0, 0, nullptr};
  const GmetaTrieNoise noise{nullptr, nullptr, nullptr, 0};
  CHECK_EQ(gmeta_gpu_trie_gumbel_step(nullptr, nullptr, nullptr, nullptr, 1, 1, 3, &level, &noise,
                                      kMostBeams + 1, nullptr, nullptr, nullptr, nullptr, nullptr,
                                      nullptr),
           static_cast<int>(GMETA_CUDA_UNSUPPORTED));
}

}  // namespace

int main() {
  const Shape shapes[] = {
      {3, 1, 1, 300, 1, 2.0f},   // at the root
      {2, 40, 50, 64, 2, 2.0f},  // more beams than warps
      {2, 7, 9, 40, 3, 40.0f},   // probabilities far apart
      {3, 5, 30, 6, 4, 1.0f},    // few children, or one, or none
      {2, 3, 4, 33, 1, 0.0f},    // equally probable ones
      {2, 0, 3, 5, 1, 1.0f},     // no beams
      {0, 3, 3, 5, 1, 1.0f},
  };
  uint32_t seed = 0;
  for (const Shape& shape : shapes) {
    for (int again = 0; again < 4; ++again) {
      Case drawn(shape, ++seed);
      CHECK(drawn.SampleOnGpu() == drawn.SampleOnCpu());
      for (const int64_t k : {1, 30, 200}) CHECK(drawn.StepOnGpu(k) == drawn.StepOnCpu(k));
    }
  }
  CheckWeightsHaveTheVectorsBits();
  CheckDrawsBelow();
  CheckWrongBeams();
}
