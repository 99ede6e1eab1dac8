// HSTU's attention against loops in double precision: all widths of vectors, masks of every kind,
// the bias and its gradients, and the same bits on any number of threads.

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "ops/attention/host/attention.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

namespace {

using gmeta::hstu::BiasGradient;
using gmeta::hstu::Gradients;
using gmeta::hstu::Inputs;
using gmeta::hstu::Visible;
using gmeta::hstu::Weights;

struct Case {
  std::vector<int64_t> offsets{0}, starts, times;
  std::vector<float> q, k, v, of_out, positions, buckets;
  std::vector<Visible> visible;
  int heads, width, values;
};

// Smallest differences of buckets that grow by 35%, as the published ones.
std::vector<int64_t> Starts() {
  std::vector<int64_t> starts;
  for (int b = 1; b <= 128; ++b)
    starts.push_back(static_cast<int64_t>(std::ceil(std::exp(0.301 * b))));
  return starts;
}

Case Draw(std::mt19937_64* random, const std::vector<int>& lengths, int heads, int width,
          int values) {
  Case made{{0}, Starts(), {}, {}, {}, {}, {}, {}, {}, {}, heads, width, values};
  std::normal_distribution<float> normal;
  for (const int length : lengths) {
    made.offsets.push_back(made.offsets.back() + length);
    for (int i = 0; i < length; ++i) {
      const int first = (*random)() % 3, begin = (*random)() % length;
      made.visible.push_back(
          {first, begin, begin + static_cast<int>((*random)() % (length - begin + 1))});
      made.times.push_back(static_cast<int64_t>((*random)() >> ((*random)() % 60 + 1)));
    }
  }
  const size_t tokens = made.offsets.back();
  for (auto [array, size] : {std::pair{&made.q, tokens * heads * width},
                             {&made.k, tokens * heads * width},
                             {&made.v, tokens * heads * values},
                             {&made.of_out, tokens * heads * values},
                             {&made.positions, size_t{99}},
                             {&made.buckets, size_t{129}}}) {
    for (size_t i = 0; i < size; ++i) array->push_back(normal(*random));
  }
  return made;
}

struct Found {
  std::vector<float> out, of_q, of_k, of_v;
  BiasGradient of_bias;
};

Inputs InputsOf(const Case& c, const gmeta::hstu::TimeBuckets* buckets, bool scored) {
  Inputs in{scored ? c.q.data() : nullptr,
            scored ? c.k.data() : nullptr,
            c.v.data(),
            c.heads,
            scored ? c.width : 0,
            c.values,
            0.02f,
            0.5f,
            c.visible.data(),
            {}};
  if (buckets != nullptr) {
    in.bias = {c.positions.data(), 50, c.buckets.data(), buckets, c.times.data(), c.times.data()};
  }
  return in;
}

template <class ParallelFor>
Found Run(const Case& c, Inputs in, const ParallelFor& parallel_for) {
  Found found{std::vector<float>(c.v.size()),
              std::vector<float>(c.q.size()),
              std::vector<float>(c.k.size()),
              std::vector<float>(c.v.size()),
              {c.positions.size(), c.buckets.size()}};
  const size_t sequences = c.offsets.size() - 1;
  in.out = found.out.data();
  gmeta::hstu::Forward(in, c.offsets.data(), sequences, found.out.data(), parallel_for);
  gmeta::hstu::Backward(in, c.offsets.data(), sequences, c.of_out.data(),
                        {found.of_q.data(), found.of_k.data(), found.of_v.data()}, &found.of_bias,
                        parallel_for);
  return found;
}

void Near(const std::vector<float>& found, const std::vector<double>& expected,
          double largest = 1e-3) {
  for (const double x : expected) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < expected.size(); ++i)
    CHECK(std::abs(found[i] - expected[i]) < 2e-5 * largest);
}

bool Sees(const Case& c, size_t sequence, int64_t row, int64_t column) {
  const int64_t place = column - c.offsets[sequence];
  const Visible& sees = c.visible[row];
  return row == column || place < sees.first || (place >= sees.begin && place < sees.end);
}

// The score of a pair of tokens, and the gradient of its weight.
std::pair<double, double> ScoreOf(const Case& c, const Inputs& in, int64_t i, int64_t j, int h) {
  double score = 0, of_weight = 0;
  if (in.bias.any()) {
    const size_t position = std::clamp<int64_t>(j - i + 49, 0, 98);
    const int64_t apart = std::abs(c.times[i] - c.times[j]);
    const size_t bucket =
        std::upper_bound(c.starts.begin(), c.starts.end(), apart) - c.starts.begin();
    score = c.positions[position] + c.buckets[bucket];
  }
  const size_t qi = (i * c.heads + h) * c.width, kj = (j * c.heads + h) * c.width;
  const size_t vi = (i * c.heads + h) * c.values, vj = (j * c.heads + h) * c.values;
  for (int d = 0; in.q != nullptr && d < c.width; ++d)
    score += in.alpha * double{c.q[qi + d]} * c.k[kj + d];
  for (int d = 0; d < c.values; ++d) of_weight += in.scale * double{c.of_out[vi + d]} * c.v[vj + d];
  return {score, of_weight};
}

// Of each row of each head: the sum of exponentials, and the mean gradient of its weights.
void SumRows(const Case& c, const Inputs& in, std::vector<double>* sums,
             std::vector<double>* products) {
  sums->assign(c.heads * c.offsets.back(), 0.0);
  products->assign(c.heads * c.offsets.back(), 0.0);
  for (size_t s = 0; s + 1 < c.offsets.size(); ++s) {
    for (int64_t i = c.offsets[s]; i < c.offsets[s + 1]; ++i) {
      for (int h = 0; h < c.heads; ++h) {
        const size_t at = h * c.offsets.back() + i;
        for (int64_t j = c.offsets[s]; j < c.offsets[s + 1]; ++j) {
          if (!Sees(c, s, i, j)) continue;
          const auto [score, of_weight] = ScoreOf(c, in, i, j, h);
          (*sums)[at] += std::exp(score), (*products)[at] += std::exp(score) * of_weight;
        }
        (*products)[at] /= (*sums)[at];
      }
    }
  }
}

// The equations, pair by pair.
void Compare(const Case& c, const Inputs& in, const Found& found) {
  std::vector<double> out(c.v.size()), of_q(c.q.size()), of_k(c.k.size()), of_v(c.v.size()),
      of_positions(99);
  std::vector<double> of_buckets(129);
  const bool softmax = in.weights() == Weights::kSoftmax;
  std::vector<double> sums, products;
  if (softmax) SumRows(c, in, &sums, &products);
  for (size_t s = 0; s + 1 < c.offsets.size(); ++s) {
    for (int64_t i = c.offsets[s]; i < c.offsets[s + 1]; ++i) {
      for (int64_t j = c.offsets[s]; j < c.offsets[s + 1]; ++j) {
        if (!Sees(c, s, i, j)) continue;
        const size_t position = std::clamp<int64_t>(j - i + 49, 0, 98);
        const int64_t apart = std::abs(c.times[i] - c.times[j]);
        const size_t bucket =
            std::upper_bound(c.starts.begin(), c.starts.end(), apart) - c.starts.begin();
        for (int h = 0; h < c.heads; ++h) {
          const auto [score, of_weight] = ScoreOf(c, in, i, j, h);
          const size_t at = h * c.offsets.back() + i;
          const size_t qi = (i * c.heads + h) * c.width, kj = (j * c.heads + h) * c.width;
          const size_t vi = (i * c.heads + h) * c.values, vj = (j * c.heads + h) * c.values;
          const double sigmoid = 1 / (1 + std::exp(-score));
          double weight = in.q == nullptr ? score : score * sigmoid;
          double of_score =
              of_weight * (in.q == nullptr ? 1 : sigmoid * (1 + score * (1 - sigmoid)));
          if (softmax) {
            weight = std::exp(score) / sums[at];
            of_score = weight * (of_weight - products[at]);
          }
          for (int d = 0; d < c.values; ++d) {
            out[vi + d] += in.scale * weight * c.v[vj + d];
            of_v[vj + d] += in.scale * weight * c.of_out[vi + d];
          }
          of_positions[position] += of_score, of_buckets[bucket] += of_score;
          for (int d = 0; in.q != nullptr && d < c.width; ++d) {
            of_q[qi + d] += in.alpha * of_score * c.k[kj + d];
            of_k[kj + d] += in.alpha * of_score * c.q[qi + d];
          }
        }
      }
    }
  }
  Near(found.out, out), Near(found.of_v, of_v);
  // The gradients of a softmax are small differences of numbers of this size.
  const double largest = softmax ? 0.1 : 1e-3;
  if (in.q != nullptr) Near(found.of_q, of_q, largest), Near(found.of_k, of_k, largest);
  if (!in.bias.any()) return;
  Near({found.of_bias.positions.begin(), found.of_bias.positions.end()}, of_positions, largest);
  std::vector<float> found_of_buckets(129);
  for (size_t b = 0; b < 129; ++b) found_of_buckets[b] = found.of_bias.OfBucket(b);
  Near(found_of_buckets, of_buckets, largest);
}

// A unit by vectors of a width, beside those that the machine prefers.
template <int W, Weights kWeights>
void CompareWidth(const Case& c, const Inputs& in, const Found& found) {
  std::vector<float> out(c.v.size());
  gmeta::hstu::Workspace work;
  for (size_t s = 0; s + 1 < c.offsets.size(); ++s) {
    for (int h = 0; h < c.heads; ++h) {
      const int length = static_cast<int>(c.offsets[s + 1] - c.offsets[s]);
      gmeta::hstu::ForwardHead<W, kWeights>(in, {static_cast<size_t>(c.offsets[s]), length, h},
                                            out.data(), &work);
    }
  }
  Near(out, {found.out.begin(), found.out.end()});
}

void CheckBuckets(const gmeta::hstu::TimeBuckets& buckets, std::mt19937_64* random) {
  const std::vector<int64_t> starts = Starts();
  const auto check = [&](int64_t difference) {
    const auto apart = gmeta::hstu::Apart(difference);
    const auto found = std::upper_bound(starts.begin(), starts.end(), apart,
                                        [](uint64_t a, int64_t b) { return a < uint64_t(b); });
    CHECK_EQ(int{buckets.Of(difference)}, found - starts.begin());
  };
  CHECK_EQ(buckets.buckets(), size_t{129});
  for (int i = 0; i < 100000; ++i) check(static_cast<int64_t>((*random)() >> ((*random)() % 63)));
  for (const int64_t start : starts) {
    for (const int64_t by : {-1, 0, 1}) check(start + by), check(-(start + by));
  }
  for (const int64_t extreme : {INT64_MIN, INT64_MIN + 1, INT64_MAX}) check(extreme);

  const auto are = [](std::vector<int64_t> given) {
    return gmeta::hstu::AreTimeBuckets(given.data(), given.size());
  };
  CHECK(are(starts) && are({}) && are({1, 1, 2, 2, 3}) && are({9, 13}) && are({INT64_MAX}));
  CHECK(!are({0}) && !are({3, 2}) && !are({9, 9}) && !are({17, 18}) && !are({-5, 5}));
  CHECK(!are(std::vector<int64_t>(256, 1)) && are(std::vector<int64_t>(255, 1)));
}

}  // namespace

int main() {
  std::mt19937_64 random(5);
  const gmeta::hstu::TimeBuckets buckets(Starts().data(), 128);
  CheckBuckets(buckets, &random);
  const std::vector<std::vector<int>> batches = {{1}, {3, 0, 8}, {64, 33}, {130, 1, 65}};
  for (const std::vector<int>& lengths : batches) {
    for (const auto& [heads, width, values] :
         {std::tuple{1, 1, 1}, {2, 16, 16}, {3, 5, 40}, {1, 64, 9}}) {
      const Case c = Draw(&random, lengths, heads, width, values);
      for (const bool biased : {false, true}) {
        for (const Weights weights : {Weights::kBias, Weights::kSilu, Weights::kSoftmax}) {
          Inputs in = InputsOf(c, biased ? &buckets : nullptr, weights != Weights::kBias);
          std::vector<float> log_sums(heads * c.offsets.back());
          in.tokens = c.offsets.back();
          if (weights == Weights::kSoftmax) in.log_sums = log_sums.data();
          const Found found = Run(c, in, Serial{});
          Compare(c, in, found);
          const Found again = Run(c, in, Threads{3});
          CHECK(found.out == again.out && found.of_v == again.of_v && found.of_k == again.of_k);
          CHECK(found.of_q == again.of_q && found.of_bias.positions == again.of_bias.positions);
          if (weights == Weights::kSilu) {
            CompareWidth<4, Weights::kSilu>(c, in, found);
            CompareWidth<8, Weights::kSilu>(c, in, found);
          } else if (weights == Weights::kSoftmax) {
            CompareWidth<4, Weights::kSoftmax>(c, in, found);
            CompareWidth<8, Weights::kSoftmax>(c, in, found);
          }
        }
      }
    }
  }
}
