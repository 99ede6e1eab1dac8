// What is added to a score for how far apart two tokens are, in places and in time, and its
// gradient.

#ifndef GMETA_OPS_ATTENTION_HOST_RELATIVE_BIAS_H_
#define GMETA_OPS_ATTENTION_HOST_RELATIVE_BIAS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention/time_buckets.h"

namespace gmeta::hstu {

// Null pointers for what is absent.
struct RelativeBias {
  const float* positions = nullptr;  // (2n - 1)
  int64_t n = 0;
  const float* time_buckets = nullptr;
  const TimeBuckets* buckets = nullptr;
  const int64_t* row_times = nullptr;  // of a sequence's first token on
  const int64_t* column_times = nullptr;

  bool any() const { return positions != nullptr || time_buckets != nullptr; }
  RelativeBias From(size_t token) const {
    RelativeBias other = *this;
    if (time_buckets != nullptr) other.row_times += token, other.column_times += token;
    return other;
  }
  // Whether the table has a number of its own for all distances from a row to columns.
  bool Within(int64_t row, int64_t begin, int64_t end) const {
    return begin - row > -n && end - row <= n;
  }
  size_t Place(int64_t row, int64_t column) const {
    return static_cast<size_t>(std::clamp(column - row + n - 1, int64_t{0}, 2 * n - 2));
  }
};

// Gradients of the tables. A bucket has several sums, which columns take in turn: neighbours are
// mostly of one bucket, and adding to a number has to wait until what was added before is there.
struct BiasGradient {
  static constexpr int kSums = 4;

  BiasGradient(size_t places, size_t buckets) : positions(places), sums(buckets * kSums) {}

  std::vector<double> positions;
  std::vector<double> sums;

  double OfBucket(size_t bucket) const {
    const double* of = sums.data() + bucket * kSums;
    return (of[0] + of[1]) + (of[2] + of[3]);
  }

  void Add(const BiasGradient& other) {
    for (size_t i = 0; i < positions.size(); ++i) positions[i] += other.positions[i];
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += other.sums[i];
  }
};

// A row of scores gets its bias: `to` is of the columns [begin, end) of a row. Buckets are kept.
inline void AddBias(const RelativeBias& bias, int64_t row, int64_t begin, int64_t end, float* to,
                    uint8_t* buckets) {
  if (bias.positions != nullptr) {
    if (bias.Within(row, begin, end)) {
      const float* from = bias.positions + (begin - row + bias.n - 1);
      for (int64_t j = 0; j < end - begin; ++j) to[j] += from[j];
    } else {
      for (int64_t j = begin; j < end; ++j) to[j - begin] += bias.positions[bias.Place(row, j)];
    }
  }
  if (bias.time_buckets != nullptr) {
    const int64_t time = bias.row_times[row];
    for (int64_t j = begin; j < end; ++j) {
      const uint8_t bucket = bias.buckets->Of(time - bias.column_times[j]);
      buckets[j - begin] = bucket;
      to[j - begin] += bias.time_buckets[bucket];
    }
  }
}

// The tables' gradients get those of a row of scores.
inline void AddBiasGradient(const RelativeBias& bias, int64_t row, int64_t begin, int64_t end,
                            const float* from, const uint8_t* buckets, BiasGradient* to) {
  if (bias.positions != nullptr) {
    if (bias.Within(row, begin, end)) {
      double* sums = to->positions.data() + (begin - row + bias.n - 1);
      for (int64_t j = 0; j < end - begin; ++j) sums[j] += from[j];
    } else {
      for (int64_t j = begin; j < end; ++j) to->positions[bias.Place(row, j)] += from[j - begin];
    }
  }
  if (bias.time_buckets != nullptr) {
    constexpr int kSums = BiasGradient::kSums;
    for (int64_t j = 0; j < end - begin; ++j) to->sums[buckets[j] * kSums + j % kSums] += from[j];
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_RELATIVE_BIAS_H_
