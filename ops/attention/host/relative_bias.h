// The bias added to a score for the distance of two tokens, in places and in time, and its
// gradient.

#ifndef GMETA_OPS_ATTENTION_HOST_RELATIVE_BIAS_H_
#define GMETA_OPS_ATTENTION_HOST_RELATIVE_BIAS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention/time_buckets.h"

namespace gmeta::hstu {

// A relative bias; pointers to absent parts are null.
struct RelativeBias {
  const float* positions = nullptr;  // (2n - 1)
  int64_t n = 0;
  const float* time_buckets = nullptr;
  const TimeBuckets* buckets = nullptr;
  const int64_t* row_times = nullptr;  // from a sequence's first token on
  const int64_t* column_times = nullptr;

  bool any() const { return positions != nullptr || time_buckets != nullptr; }
  RelativeBias From(size_t token) const {
    RelativeBias other = *this;
    if (time_buckets != nullptr) other.row_times += token, other.column_times += token;
    return other;
  }
  // Returns whether the table has a number for every distance from the row to the columns, without
  // clamping.
  bool Within(int64_t row, int64_t begin, int64_t end) const {
    return begin - row > -n && end - row <= n;
  }
  size_t Place(int64_t row, int64_t column) const {
    return static_cast<size_t>(std::clamp(column - row + n - 1, int64_t{0}, 2 * n - 2));
  }
};

// Gradients of the tables. A bucket has several sums, which columns take in turn: neighbours are
// mostly in one bucket, and each addition to a number waits for the previous one.
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

// Adds the bias to a row of scores; `to` holds the columns [begin, end) of the row. Writes their
// buckets.
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

// Adds the gradients of a row of scores to those of the tables.
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
