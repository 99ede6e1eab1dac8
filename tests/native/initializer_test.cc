#include "ops/table/core/initializer.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/native/check.h"

using gmeta::Initializer;
using Kind = gmeta::Initializer::Kind;

namespace {

// The known answers that come with Random123, the authors' implementation.
void TestPhiloxKnownAnswers() {
  struct Case {
    uint64_t key;
    gmeta::PhiloxCounter counter;
    uint32_t expected[4];
  };
  const Case cases[] = {
      {0, {{0, 0, 0, 0}}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {UINT64_MAX,
       {{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX}},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x299f31d0a4093822,
       {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Case& c : cases) {
    uint32_t words[gmeta::kPhiloxWords];
    gmeta::Philox4x32(c.key, c.counter, words);
    for (int i = 0; i < 4; ++i) CHECK_EQ(words[i], c.expected[i]);
  }
}

void TestLanesAreConsecutiveCounters() {
  const uint32_t start = UINT32_MAX - 3;  // the count wraps within the lanes
  uint32_t all[gmeta::kPhiloxWords], one[gmeta::kPhiloxWords];
  gmeta::Philox4x32(5, {{start, 1, 2, 3}}, all);
  for (uint32_t lane = 0; lane < gmeta::kPhiloxLanes; ++lane) {
    gmeta::Philox4x32(5, {{start + lane, 1, 2, 3}}, one);
    for (int i = 0; i < 4; ++i) CHECK_EQ(all[4 * lane + i], one[i]);
  }
}

void TestLogAndInverseErfAgainstDouble() {
  for (double x = 1e-7; x <= 1.0; x *= 1.00037) {
    const float argument = static_cast<float>(x);
    const double exact = std::log(static_cast<double>(argument));
    CHECK(std::abs(gmeta::NaturalLog(argument) - exact) <= 1.2e-7 * std::abs(exact) + 1e-9);
  }
  // erf(erfinv(x)) = x; the slope of erfinv turns a relative error of its value into one of 1 -
  // |x|.
  for (int i = -16777215; i <= 16777215; i += 1022) {  // odd steps of 2^-24, both ends included
    const float x = static_cast<float>(i) / 16777216.0f;
    const double y = gmeta::InverseErf(x);
    const double slope = 2 / std::sqrt(std::acos(-1.0)) * std::exp(-y * y);
    const double error = (std::erf(y) - x) / slope;
    CHECK(std::abs(error) <= 5e-7 * std::abs(y));
  }
}

void TestARowIsAPrefixOfAWiderOne() {
  const Initializer normal{Kind::kNormal, 1.0f, 2.0f, 99};
  std::vector<float> wide(200);
  normal.Fill(-3, wide.size(), wide.data());
  for (size_t i = gmeta::kPhiloxWords; i < wide.size(); ++i) {  // no block is there twice
    CHECK(wide[i] != wide[i - gmeta::kPhiloxWords]);
  }
  for (size_t dim = 1; dim < wide.size(); dim += 13) {
    std::vector<float> row(dim + 1, -1234.0f);
    normal.Fill(-3, dim, row.data());
    for (size_t i = 0; i < dim; ++i) CHECK_EQ(row[i], wide[i]);
    CHECK_EQ(row[dim], -1234.0f);  // nothing is written beyond the row
  }
}

struct Moments {
  double mean = 0, variance = 0, low = 1e9, high = -1e9;
};

Moments Measure(const Initializer& initializer) {
  constexpr int kKeys = 4000;
  constexpr int kDim = 64;
  Moments m;
  double squares = 0;
  std::vector<float> row(kDim);
  for (int64_t key = 0; key < kKeys; ++key) {
    initializer.Fill(key, kDim, row.data());
    for (const float x : row) {
      m.mean += x;
      squares += static_cast<double>(x) * x;
      m.low = std::min<double>(m.low, x);
      m.high = std::max<double>(m.high, x);
    }
  }
  m.mean /= kKeys * kDim;
  m.variance = squares / (kKeys * kDim) - m.mean * m.mean;
  return m;
}

// Bounds are five standard errors of 256,000 numbers.
void TestDistributions() {
  const Moments uniform = Measure({Kind::kUniform, -1.0f, 3.0f, 1});
  CHECK(std::abs(uniform.mean - 1) < 0.012);
  CHECK(std::abs(uniform.variance - 16.0 / 12) < 0.012);
  CHECK(uniform.low >= -1 && uniform.high < 3);
  const Moments normal = Measure({Kind::kNormal, 0.5f, 2.0f, 1});
  CHECK(std::abs(normal.mean - 0.5) < 0.02);
  CHECK(std::abs(normal.variance - 4) < 0.06);
  CHECK(normal.low < -6 && normal.high > 7);
  const Moments truncated = Measure({Kind::kTruncatedNormal, 0.0f, 1.0f, 1});
  CHECK(std::abs(truncated.mean) < 0.01);
  CHECK(std::abs(truncated.variance - 0.7737413) < 0.01);
  CHECK(truncated.low > -2 && truncated.high < 2);
  const Moments constant = Measure({Kind::kConstant, 0.25f, 0.0f, 1});
  CHECK(constant.low == 0.25 && constant.high == 0.25);
}

// However many words are asked for, and from wherever on.
void TestStreamsAreBlocks() {
  for (const uint32_t start : {0u, 7u, 1u << 31}) {
    for (const size_t n : {1, 16, 31, 32, 33, 64, 128}) {
      const gmeta::PhiloxCounter first{{start, 3, 0xfffffffeu, 9}};
      constexpr uint64_t kKey = 0x9876543210fedcbaull;
      uint32_t stream[160], portable[160];
      gmeta::PhiloxStream(kKey, first, n, stream);
      gmeta::portable::PhiloxStream(kKey, first, n, portable);
      for (size_t i = 0; i < n; i += 4) {
        uint32_t block[4];
        const auto number = start + static_cast<uint32_t>(i / 4);
        gmeta::Philox4x32<1>(kKey, {{number, 3, 0xfffffffeu, 9}}, block);
        for (size_t j = i; j < std::min(n, i + 4); ++j) {
          CHECK(stream[j] == block[j - i] && portable[j] == block[j - i]);
        }
      }
    }
  }
}

void TestSeedsAndKeysMakeDifferentRows() {
  float a[4], b[4], c[4], d[4];
  Initializer{Kind::kUniform, 0, 1, 7}.Fill(1, 4, a);
  Initializer{Kind::kUniform, 0, 1, 8}.Fill(1, 4, b);
  Initializer{Kind::kUniform, 0, 1, 7}.Fill(2, 4, c);
  Initializer{Kind::kUniform, 0, 1, 7}.Fill(int64_t{1} << 32, 4, d);
  CHECK(a[0] != b[0] && a[0] != c[0] && a[0] != d[0] && c[0] != d[0]);
}

// What a thread of a GPU makes of a row is what Fill makes.
void TestBlocksMakeARow() {
  constexpr size_t kDim = 300;
  for (const Kind kind : {Kind::kConstant, Kind::kUniform, Kind::kNormal, Kind::kTruncatedNormal}) {
    const Initializer initializer{kind, -0.5f, 2.0f, uint64_t{1} << 63 | 5};
    for (const int64_t key : {INT64_MIN, int64_t{-1}, int64_t{0}, INT64_MAX}) {
      float row[kDim], block[4];
      initializer.Fill(key, kDim, row);
      for (uint32_t i = 0; i < kDim / 4; ++i) {
        initializer.Block(key, i, block);
        CHECK(std::equal(block, block + 4, row + 4 * i));
      }
    }
  }
}

}  // namespace

int main() {
  TestPhiloxKnownAnswers();
  TestLanesAreConsecutiveCounters();
  TestStreamsAreBlocks();
  TestLogAndInverseErfAgainstDouble();
  TestARowIsAPrefixOfAWiderOne();
  TestBlocksMakeARow();
  TestDistributions();
  TestSeedsAndKeysMakeDifferentRows();
}
