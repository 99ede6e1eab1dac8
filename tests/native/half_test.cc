// Every half, every rounding: the two forms against each other and against the definition.

#include "ops/common/halves/half.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "tests/native/check.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool Same(float a, float b) {
  return a == b ? std::signbit(a) == std::signbit(b) : a != a && b != b;
}

double ValueOf(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

void TestEveryHalf() {
  std::vector<uint16_t> halves(65536), again(65536);
  for (uint32_t i = 0; i < 65536; ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats(65536), portable(65536);
  gmeta::FromHalves(halves.data(), halves.size(), floats.data());
  gmeta::portable::FromHalves(halves.data(), halves.size(), portable.data());
  gmeta::ToHalves(floats.data(), floats.size(), again.data());
  for (uint32_t i = 0; i < 65536; ++i) {
    CHECK(Same(floats[i], portable[i]));
    if ((i & 0x7c00) == 0x7c00) continue;  // infinities and NaNs
    CHECK_EQ(static_cast<double>(floats[i]), ValueOf(halves[i]));
    CHECK_EQ(again[i], halves[i]);
  }
}

// Between two neighbours: below the middle, on it, above it.
void TestRounding() {
  for (uint16_t half = 0; half < 0x7bff; ++half) {
    const double low = ValueOf(half), high = ValueOf(half + 1);
    const float middle = static_cast<float>((low + high) / 2);  // exact
    const float inputs[] = {middle, std::nextafter(middle, 0.0f),
                            std::nextafter(middle, kInfinity)};
    const uint16_t expected[] = {static_cast<uint16_t>(half + (half & 1)), half,
                                 static_cast<uint16_t>(half + 1)};
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(gmeta::portable::ToHalf(inputs[i]), expected[i]);
      CHECK_EQ(gmeta::portable::ToHalf(-inputs[i]), expected[i] | 0x8000);
      std::vector<float> wide(8, inputs[i]);  // enough for the vector form
      std::vector<uint16_t> out(8);
      gmeta::ToHalves(wide.data(), 8, out.data());
      CHECK_EQ(out[0], expected[i]);
    }
  }
}

void TestRandomBitsAgree() {
  std::mt19937 random(3);
  std::vector<float> floats(1 << 20);
  for (float& x : floats) x = gmeta::portable::FloatOf(static_cast<uint32_t>(random()));
  floats.resize(floats.size() - 3);  // a tail
  const float special[] = {kInfinity, -kInfinity, NAN, 65504.0f, 65519.9f, 65520.0f, 1e30f, -0.0f};
  std::copy(std::begin(special), std::end(special), floats.begin());
  std::vector<uint16_t> halves(floats.size()), portable(floats.size());
  gmeta::ToHalves(floats.data(), floats.size(), halves.data());
  gmeta::portable::ToHalves(floats.data(), floats.size(), portable.data());
  for (size_t i = 0; i < floats.size(); ++i) {
    const float x = gmeta::portable::FromHalf(halves[i]);
    CHECK(Same(x, gmeta::portable::FromHalf(portable[i])));
    CHECK_EQ(std::isnan(x), std::isnan(floats[i]));
    CHECK(!std::isinf(x));
  }
}

void TestBfloats() {
  std::mt19937 random(4);
  for (int i = 0; i < 1000000; ++i) {
    const float x = gmeta::portable::FloatOf(static_cast<uint32_t>(random()));
    uint16_t narrow;
    float wide;
    gmeta::ToBfloats(&x, 1, &narrow);
    gmeta::FromBfloats(&narrow, 1, &wide);
    CHECK_EQ(std::isnan(wide), std::isnan(x));
    if (!std::isnormal(x) || std::abs(x) > 3.3e38f) continue;
    CHECK(std::abs(wide - x) <= std::ldexp(std::abs(x), -8));
  }
  const float ties[] = {1.0f + 1.0f / 256, 1.0f + 3.0f / 256, -(1.0f + 1.0f / 256)};
  const float expected[] = {1.0f, 1.0f + 4.0f / 256, -1.0f};
  for (int i = 0; i < 3; ++i) {
    uint16_t narrow;
    float wide;
    gmeta::ToBfloats(&ties[i], 1, &narrow);
    gmeta::FromBfloats(&narrow, 1, &wide);
    CHECK_EQ(wide, expected[i]);
  }
}

// However wide the vectors are that the machine has, and in their tail.
void TestManyBfloatsAreAsOne() {
  std::mt19937 random(5);
  std::vector<float> floats(100003);
  for (float& x : floats) x = gmeta::portable::FloatOf(static_cast<uint32_t>(random()));
  std::vector<uint16_t> together(floats.size());
  gmeta::ToBfloats(floats.data(), floats.size(), together.data());
  for (size_t i = 0; i < floats.size(); ++i) {
    uint16_t alone;
    gmeta::portable::ToBfloats(&floats[i], 1, &alone);
    CHECK_EQ(together[i], alone);
  }
}

}  // namespace

int main() {
  TestEveryHalf();
  TestRounding();
  TestRandomBitsAgree();
  TestBfloats();
  TestManyBfloatsAreAsOne();
}
