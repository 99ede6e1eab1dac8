// Rows of any magnitude through halves with a scale, against the definition in double precision.

#include "ops/common/halves/scaled_half.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/native/check.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> ThereAndBack(const std::vector<float>& row) {
  std::vector<uint16_t> wire(row.size() + 2, 0xbeef);
  std::vector<float> found(row.size() + 1, 7.0f);
  gmeta::ToScaledHalves(row.data(), row.size(), wire.data());
  CHECK_EQ(wire[row.size() + 1], 0xbeef);
  gmeta::FromScaledHalves(wire.data(), row.size(), found.data());
  CHECK_EQ(found.back(), 7.0f);
  found.pop_back();
  return found;
}

void CheckKept(const std::vector<float>& row) {
  double largest = 0;
  for (const float x : row) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(static_cast<double>(x)));
  }
  const std::vector<float> found = ThereAndBack(row);
  for (size_t i = 0; i < row.size(); ++i) {
    const double x = row[i];
    CHECK_EQ(std::isnan(found[i]), std::isnan(x));
    if (std::isnan(x)) continue;
    CHECK_EQ(std::signbit(found[i]), std::signbit(x));
    if (std::isinf(x)) {
      CHECK_EQ(found[i], row[i]);
      continue;
    }
    // What is subnormal counts as zero, before and after.
    const double most = std::max(std::ldexp(std::abs(x), -11), std::ldexp(largest, -40));
    CHECK(std::abs(found[i] - x) <= most || std::abs(x) < FLT_MIN * 1.0005);
    CHECK(found[i] == 0 || std::abs(found[i]) >= FLT_MIN);
  }
}

// Every binade, wide rows and narrow ones, of one magnitude and of all.
void TestMagnitudes() {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<float> fraction(1.0f, 2.0f);
  for (int exponent = -149; exponent <= 127; ++exponent) {
    for (const size_t n : {1, 2, 7, 16, 300}) {
      std::vector<float> near(n), far(n);
      for (size_t i = 0; i < n; ++i) {
        const float sign = random() % 2 ? 1.0f : -1.0f;
        near[i] = sign * std::ldexp(fraction(random), exponent);
        far[i] = i == n / 2 ? near[i]
                            : sign * std::ldexp(fraction(random),
                                                exponent - static_cast<int>(random() % 60));
      }
      CheckKept(near);
      CheckKept(far);
      far[random() % n] = random() % 2 ? kInfinity : -kInfinity;
      far[random() % n] = kNan;
      CheckKept(far);
    }
  }
  CheckKept({FLT_MAX, -FLT_MAX, 1.0f, FLT_MIN, -FLT_TRUE_MIN});
  CheckKept({65519.0f, 65520.0f, 65535.996f, -65535.996f});  // round to 2^16, which is none
  CheckKept({kInfinity, -kInfinity, kNan});
  CheckKept({});
}

// What float16 holds exactly comes back exactly, negative zeros too.
void TestExact() {
  const std::vector<float> row = {0.0f, -0.0f, 1.0f, -1.5f, 1024.0f, 1.0f / 1024};
  for (const int exponent : {-100, -14, 0, 40, 117}) {
    std::vector<float> scaled = row;
    for (float& x : scaled) x = std::ldexp(x, exponent);
    const std::vector<float> found = ThereAndBack(scaled);
    for (size_t i = 0; i < row.size(); ++i) {
      CHECK_EQ(found[i], scaled[i]);
      CHECK_EQ(std::signbit(found[i]), std::signbit(scaled[i]));
    }
  }
  const std::vector<float> zeros = ThereAndBack({-0.0f, -0.0f, 0.0f});
  CHECK(std::signbit(zeros[0]) && std::signbit(zeros[1]) && !std::signbit(zeros[2]));
}

void TestScalesThatNobodySends() {
  for (const float scale : {113.0f, -127.0f, kInfinity, kNan}) {
    const uint16_t wire[] = {gmeta::portable::ToHalf(scale), 0x3c00};
    float found = 0;
    gmeta::FromScaledHalves(wire, 1, &found);
    CHECK(std::isnan(found));
  }
}

}  // namespace

int main() {
  TestMagnitudes();
  TestExact();
  TestScalesThatNobodySends();
}
