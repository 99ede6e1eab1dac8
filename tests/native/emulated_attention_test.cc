// The GPU's attention on an emulated GPU (emulated_gpu/emulation.h): the CUDA sources as they
// stand, by their C interface, against loops in double precision. Under any order of threads, and
// however late copies and products come, the bits are the same.

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "device_memory.h"
#include "ops/attention/gpu/backward/backward.cu"
#include "ops/attention/gpu/backward/softmax_backward.cu"
#include "ops/attention/gpu/bias/table_parts.cu"
#include "ops/attention/gpu/forward/forward.cu"
#include "ops/attention/gpu/forward/softmax_forward.cu"
#include "ops/attention/gpu/plan/strips.cu"
#include "ops/attention/gpu/plan/time_map.cu"
#include "ops/common/gpu/cuda_error.cu"
#include "tests/native/check.h"

namespace {

using emulated::Pace;
using std::vector;

struct Shape {
  vector<int> lengths;
  int heads;
  int width;
};

enum class Mask { kCausal, kFull, kParts };

// Which tables of a bias there are.
struct Tables {
  int n = 0;  // of the table of places
  bool times = false;
  bool alone = false;    // the bias is all: no q and k
  bool softmax = false;  // of the scores, in place of SiLU
  bool any() const { return n > 0 || times; }
  int places() const { return n > 0 ? 2 * n - 1 : 0; }
};

// What the tokens of a sequence see; kParts has contexts, targets and a window.
void AppendVisible(int length, Mask mask, std::mt19937* random, vector<int32_t>* visible) {
  const auto below = [&](int n) {
    return static_cast<int>((*random)() % static_cast<unsigned>(n));
  };
  int first = 0, end = length, window = length;
  if (mask == Mask::kParts) {
    first = below(std::min(4, length + 1));
    end = length - below(std::min(20, length - first + 1));
    window = 1 + below(100);
  }
  for (int i = 0; i < length; ++i) {
    const int before = mask == Mask::kFull ? end : std::max(first, std::min(i, end));
    const int since = std::max(first, std::min(i, end) - window);
    const bool context = i < first;
    const int begin = context || mask == Mask::kFull ? first : since;
    visible->insert(visible->end(), {first, begin, context ? first : std::max(begin, before)});
  }
}

struct Results {
  vector<double> log_sums, out, of_q, of_k, of_v, of_positions, of_buckets;
};

constexpr int kBuckets = 90;

// The smallest differences of buckets, from the second on.
vector<int64_t> Starts() {
  vector<int64_t> starts;
  for (int b = 1; b < kBuckets; ++b) {
    starts.push_back(static_cast<int64_t>(std::ceil(std::exp(0.301 * b))));
  }
  return starts;
}

int BucketOf(int64_t difference) {
  static const vector<int64_t> starts = Starts();
  int bucket = 0;
  for (const int64_t start : starts) bucket += std::llabs(difference) >= start;
  return bucket;
}

template <class T>
struct Case {
  static constexpr int kDtype = std::is_same_v<T, __nv_bfloat16> ? GMETA_BFLOAT16 : GMETA_FLOAT16;

  Shape shape;
  vector<int64_t> offsets{0};
  vector<int32_t> visible;
  vector<T> inputs;  // q, k, v, of_out of a token side by side
  float alpha, scale = 1.0f / 32;
  Tables tables;
  vector<float> positions, buckets;
  vector<int64_t> row_times, column_times;

  Case(const Shape& shape, Mask mask, uint32_t seed, Tables tables = {})
      : shape(shape), tables(tables) {
    std::mt19937 random(seed);
    for (const int length : shape.lengths) {
      offsets.push_back(offsets.back() + length);
      AppendVisible(length, mask, &random, &visible);
    }
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tokens() * 4 * row(); ++i) inputs.push_back(T(normal(random)));
    alpha = 1 / std::sqrt(static_cast<float>(shape.width));
    for (int i = 0; i < tables.places(); ++i) positions.push_back(normal(random));
    for (int i = 0; i < kBuckets; ++i) buckets.push_back(normal(random));
    int64_t time = 0;
    for (int64_t i = 0; i < tokens(); ++i) {
      time += random() >> (random() % 31);  // from nothing to a century
      column_times.push_back(time);
      row_times.push_back(time + random() % 1000);
    }
  }
  int Place(int row, int column) const {
    return std::clamp(column - row + tables.n - 1, 0, tables.places() - 1);
  }
  int Bucket(int64_t first_token, int row, int column) const {
    return BucketOf(row_times[first_token + row] - column_times[first_token + column]);
  }

  int64_t tokens() const { return offsets.back(); }
  int row() const { return shape.heads * shape.width; }
  const T* In(int which, int64_t token, int head) const {
    return inputs.data() + (4 * token + which) * row() + head * shape.width;
  }
  void Poison(size_t sequence) {
    for (int64_t i = offsets[sequence] * 4 * row(); i < offsets[sequence + 1] * 4 * row(); ++i) {
      inputs[i] = T(std::numeric_limits<float>::quiet_NaN());
    }
  }

  bool Sees(int64_t first_token, int row, int column) const {
    const int32_t* v = visible.data() + 3 * (first_token + row);
    return column < v[0] || (column >= v[1] && column < v[2]) || column == row;
  }
};

template <class T>
double Dot(const T* a, const T* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double(float(a[i])) * double(float(b[i]));
  return sum;
}

// A column that a row sees: its score, its weight, and their gradients.
struct Pair {
  int column, place, bucket;
  double x, weight, of_weight, of_x;
};

// Weighs a row's columns by softmax. Returns the logarithm of the sum, to base 2.
double WeighBySoftmax(vector<Pair>* pairs) {
  double sum = 0, inner = 0;
  for (const Pair& pair : *pairs) sum += std::exp(pair.x);
  for (Pair& pair : *pairs) {
    pair.weight = std::exp(pair.x) / sum;
    inner += pair.weight * pair.of_weight;
  }
  for (Pair& pair : *pairs) pair.of_x = pair.weight * (pair.of_weight - inner);
  return std::log2(sum);
}

template <class T>
Results Expected(const Case<T>& c) {
  const size_t size = static_cast<size_t>(c.tokens()) * c.row();
  const vector<double> zeros(size);
  Results to{vector<double>(c.tables.softmax ? c.tokens() * c.shape.heads : 0),
             zeros,
             zeros,
             zeros,
             zeros,
             vector<double>(c.tables.places()),
             vector<double>(kBuckets)};
  const int width = c.shape.width;
  for (size_t s = 0; s + 1 < c.offsets.size(); ++s) {
    const int64_t begin = c.offsets[s];
    const int length = static_cast<int>(c.offsets[s + 1] - begin);
    for (int head = 0; head < c.shape.heads; ++head) {
      for (int i = 0; i < length; ++i) {
        const auto row = [&](vector<double>& of, int token) {
          return of.data() + (begin + token) * c.row() + head * width;
        };
        const bool alone = c.tables.alone;
        vector<Pair> pairs;
        for (int j = 0; j < length; ++j) {
          if (!c.Sees(begin, i, j)) continue;
          double x = c.alpha * Dot(c.In(0, begin + i, head), c.In(1, begin + j, head), width);
          if (alone) x = 0;
          const int place = c.tables.n > 0 ? c.Place(i, j) : 0,
                    bucket = c.tables.times ? c.Bucket(begin, i, j) : 0;
          if (c.tables.n > 0) x += c.positions[place];
          if (c.tables.times) x += c.buckets[bucket];
          const double gate = alone ? 1 : 1 / (1 + std::exp(-x));
          const double of_weight =
              c.scale * Dot(c.In(3, begin + i, head), c.In(2, begin + j, head), width);
          pairs.push_back(
              {j, place, bucket, x, x * gate, of_weight, of_weight * gate * (1 + x * (1 - gate))});
        }
        if (c.tables.softmax) {
          to.log_sums[head * c.tokens() + begin + i] = WeighBySoftmax(&pairs);
        }
        for (const Pair& pair : pairs) {
          const int j = pair.column;
          if (c.tables.n > 0) to.of_positions[pair.place] += pair.of_x;
          to.of_buckets[pair.bucket] += pair.of_x;
          for (int d = 0; d < width; ++d) {
            row(to.out, i)[d] += c.scale * pair.weight * float(c.In(2, begin + j, head)[d]);
            if (!alone) {
              row(to.of_q, i)[d] += c.alpha * pair.of_x * float(c.In(1, begin + j, head)[d]);
              row(to.of_k, j)[d] += c.alpha * pair.of_x * float(c.In(0, begin + i, head)[d]);
            }
            row(to.of_v, j)[d] += c.scale * pair.weight * float(c.In(3, begin + i, head)[d]);
          }
        }
      }
    }
  }
  return to;
}

template <class T>
struct Found {
  vector<T> out, of_q, of_k, of_v;
  vector<float> of_positions, of_buckets, log_sums;

  bool operator==(const Found& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.empty() || std::memcmp(a.data(), b.data(), sizeof(a[0]) * a.size()) == 0;
    };
    return same(out, other.out) && same(of_q, other.of_q) && same(of_k, other.of_k) &&
           same(of_v, other.of_v) && same(of_positions, other.of_positions) &&
           same(of_buckets, other.of_buckets) && same(log_sums, other.log_sums);
  }
};

template <class T>
Found<T> Attend(const Case<T>& c, Pace pace, uint32_t seed) {
  emulated::settings.pace = pace, emulated::settings.seed = seed;
  const int64_t tokens = c.tokens();
  const int batch = static_cast<int>(c.shape.lengths.size());
  vector<uint4> plan(static_cast<size_t>(gmeta_hstu_plan_bytes(tokens, batch)) / 16 + 1);
  CHECK_EQ(gmeta_hstu_plan(c.offsets.data(), c.visible.data(), tokens, batch, plan.data(), nullptr),
           0);
  const auto heads_of = [&](const T* data, int64_t stride) {
    return GmetaHeads{const_cast<T*>(data), stride};
  };
  const auto input = [&](int which) { return heads_of(c.In(which, 0, 0), 4 * c.row()); };
  const vector<int64_t> starts = Starts();
  vector<uint4> map;
  if (c.tables.times) {
    int64_t bytes = 0;
    CHECK_EQ(gmeta_hstu_time_map_bytes(plan.data(), tokens, batch, &bytes, nullptr), 0);
    map.resize(static_cast<size_t>(bytes) / 16);
    std::memset(map.data(), 0xFE, 16 * map.size());
    CHECK_EQ(
        gmeta_hstu_time_map(plan.data(), tokens, batch, c.row_times.data(), c.column_times.data(),
                            starts.data(), kBuckets - 1, map.data(), nullptr),
        0);
  }
  const GmetaHstuBias bias{c.tables.n > 0 ? c.positions.data() : nullptr, c.tables.n,
                           c.tables.times ? c.buckets.data() : nullptr, kBuckets, map.data()};
  const vector<T> poison(static_cast<size_t>(tokens) * c.row(),
                         T(std::numeric_limits<float>::quiet_NaN()));
  const auto poisoned = [](int64_t size) {
    return vector<float>(size, std::numeric_limits<float>::quiet_NaN());
  };
  const int64_t rows = c.tables.softmax ? tokens * c.shape.heads : 0;
  Found<T> found{
      poison,        poison, poison, poison, poisoned(c.tables.places()), poisoned(kBuckets),
      poisoned(rows)};
  vector<float> products = poisoned(rows);
  const GmetaSoftmax softmax{found.log_sums.data(), heads_of(found.out.data(), c.row()),
                             products.data()};
  const GmetaHstuAttention attention{Case<T>::kDtype,
                                     batch,
                                     tokens,
                                     c.shape.heads,
                                     c.shape.width,
                                     c.alpha,
                                     c.scale,
                                     c.visible.data(),
                                     plan.data(),
                                     c.tables.alone ? GmetaHeads{} : input(0),
                                     c.tables.alone ? GmetaHeads{} : input(1),
                                     input(2),
                                     c.tables.any() ? &bias : nullptr,
                                     c.tables.softmax ? &softmax : nullptr};
  vector<uint4> workspace;
  if (c.tables.any()) {
    workspace.resize(static_cast<size_t>(gmeta_hstu_bias_workspace(&attention)) / 16 + 1);
    std::memset(workspace.data(), 0xFF, 16 * workspace.size());  // NaN
  }
  const GmetaHstuBiasGradient of_bias{found.of_positions.data(), found.of_buckets.data(),
                                      workspace.data()};
  const auto output = [&](vector<T>& of) { return heads_of(of.data(), c.row()); };
  CHECK_EQ(gmeta_hstu_forward(&attention, output(found.out), nullptr), 0);
  CHECK_EQ(gmeta_hstu_backward(&attention, input(3), output(found.of_q), output(found.of_k),
                               output(found.of_v), &of_bias, nullptr),
           0);
  return found;
}

template <class T>
double Distance(const vector<T>& found, const vector<double>& expected) {
  double apart = 0, all = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    apart += std::pow(float(found[i]) - expected[i], 2), all += std::pow(expected[i], 2);
  }
  return all == 0 ? std::sqrt(apart) : std::sqrt(apart / all);
}

template <class T>
void Check(const Shape& shape, Mask mask, uint32_t seed, Tables tables = {}) {
  const Case<T> c(shape, mask, seed, tables);
  const Results expected = Expected(c);
  const Found<T> found = Attend(c, Pace::kEarly, seed);
  // P and dS are rounded, and so are results.
  const double limit = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
  CHECK(Distance(found.out, expected.out) < limit);
  if (!tables.alone) {
    CHECK(Distance(found.of_q, expected.of_q) < limit);
    CHECK(Distance(found.of_k, expected.of_k) < limit);
  }
  CHECK(Distance(found.of_v, expected.of_v) < limit);
  for (size_t i = 0; i < expected.log_sums.size(); ++i) {
    CHECK(std::fabs(found.log_sums[i] - expected.log_sums[i]) < 1e-5);
  }
  // dS isn't rounded here, but outputs are, of which softmax makes it.
  const double of_tables = tables.softmax ? 2 * limit : 1e-5;
  if (tables.n > 0) CHECK(Distance(found.of_positions, expected.of_positions) < of_tables);
  if (tables.times) CHECK(Distance(found.of_buckets, expected.of_buckets) < of_tables);
  CHECK(found == Attend(c, Pace::kLate, seed + 1));
}

// A bias stands where products count for nothing.
void CheckBiasAlone() {
  using T = __nv_bfloat16;
  Case<T> c({{70, 40}, 1, 64}, Mask::kCausal, 5, {90, true});
  c.alpha = 0;
  const Results expected = Expected(c);
  const Found<T> found = Attend(c, Pace::kLate, 5);
  CHECK(Distance(found.out, expected.out) < 0x1p-8);
  CHECK(Distance(found.of_v, expected.of_v) < 0x1p-8);
  CHECK(Distance(found.of_positions, expected.of_positions) < 1e-5);
  for (const T x : found.of_q) CHECK(std::fabs(float(x)) < 1e-20);
}

// Softmax of scores so far apart that bases rise from block to block.
void CheckFarApart() {
  using T = __half;
  Case<T> c({{300, 130}, 1, 64}, Mask::kFull, 31, {0, false, false, true});
  c.alpha = 2;
  const Results expected = Expected(c);
  const Found<T> found = Attend(c, Pace::kEarly, 31);
  CHECK(Distance(found.out, expected.out) < 0x1p-10);
  CHECK(Distance(found.of_v, expected.of_v) < 0x1p-10);
  CHECK(Distance(found.log_sums, expected.log_sums) < 1e-6);
  CHECK(found == Attend(c, Pace::kLate, 32));
}

// Numbers of other sequences, NaN among them, don't get in.
void CheckNeighbours(int width, bool softmax = false) {
  using T = __nv_bfloat16;
  Case<T> c({{70, 90, 33}, 1, width}, Mask::kCausal, 7, {0, false, false, softmax});
  const Found<T> before = Attend(c, Pace::kEarly, 1);
  c.Poison(0), c.Poison(2);
  const Found<T> after = Attend(c, Pace::kLate, 2);
  for (int64_t i = c.offsets[0] * c.row(); i < c.offsets[3] * c.row(); ++i) {
    const bool own = i >= c.offsets[1] * c.row() && i < c.offsets[2] * c.row();
    for (const auto of : {&Found<T>::out, &Found<T>::of_q, &Found<T>::of_k, &Found<T>::of_v}) {
      CHECK(own ? (after.*of)[i].bits == (before.*of)[i].bits : std::isnan(float((after.*of)[i])));
    }
  }
}

}  // namespace

int main() {
  using Bfloat16 = __nv_bfloat16;
  const vector<int> lengths{5, 0, 1, 63, 64, 65, 200};
  Check<Bfloat16>({lengths, 2, 64}, Mask::kCausal, 1);
  Check<__half>({lengths, 1, 64}, Mask::kParts, 2);
  Check<Bfloat16>({{130, 7}, 1, 64}, Mask::kFull, 3);
  Check<Bfloat16>({{130, 200}, 1, 128}, Mask::kParts, 4);
  Check<__half>({{129, 64}, 1, 128}, Mask::kCausal, 5);
  Check<Bfloat16>({{97, 129}, 1, 256}, Mask::kParts, 6);
  Check<Bfloat16>({{5, 2200}, 1, 64}, Mask::kParts,
                  29);  // groups of strips of which most are hidden
  // Fewer places than there are distances, and enough.
  const Tables positions{60, false}, times{0, true}, both{60, true}, all{400, true};
  Check<Bfloat16>({lengths, 2, 64}, Mask::kCausal, 7, both);
  Check<__half>({{200}, 1, 64}, Mask::kFull, 8, positions);
  Check<__half>({{70, 130}, 1, 128}, Mask::kParts, 9, both);
  Check<Bfloat16>({{97, 64}, 1, 256}, Mask::kParts, 10, times);
  Check<Bfloat16>({{129}, 1, 256}, Mask::kCausal, 11, positions);
  Check<Bfloat16>({{130, 200}, 1, 128}, Mask::kParts, 12, all);
  Check<__half>({{200}, 1, 64}, Mask::kFull, 13, all);
  Check<Bfloat16>({{129}, 1, 256}, Mask::kFull, 14, all);
  Check<Bfloat16>({lengths, 2, 64}, Mask::kCausal, 15, {60, false, true});
  Check<__half>({{70, 130}, 1, 128}, Mask::kParts, 16, {400, true, true});
  Check<Bfloat16>({{130, 97}, 1, 256}, Mask::kFull, 17, {0, true, true});
  CheckBiasAlone();
  CheckNeighbours(64);
  CheckNeighbours(256);
  const Tables softmax{0, false, false, true};
  Check<Bfloat16>({lengths, 2, 64}, Mask::kCausal, 21, softmax);
  Check<__half>({lengths, 1, 64}, Mask::kParts, 22, softmax);
  Check<Bfloat16>({{130, 200}, 1, 128}, Mask::kParts, 23, softmax);
  Check<Bfloat16>({{97, 129}, 1, 256}, Mask::kParts, 24, softmax);
  Check<Bfloat16>({{70, 130}, 1, 64}, Mask::kParts, 25, {60, true, false, true});
  Check<__half>({{130}, 1, 128}, Mask::kCausal, 26, {60, true, false, true});
  Check<Bfloat16>({{97, 64}, 1, 256}, Mask::kParts, 27, {0, true, false, true});
  Check<__half>({{0, 0}, 1, 64}, Mask::kCausal, 28, softmax);
  CheckFarApart();
  CheckNeighbours(64, true);
  CheckNeighbours(256, true);
}
