// Every half, every rounding: the two forms against each other and against the definition.

#include "ops/common/halves/half.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "ops/table/core/half_rounding.h"
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

// All random bits together give the number itself, to the last digit.
template <class Draw, class Value>
void CheckDraws(float x, const Draw& draw, const Value& value) {
  constexpr uint32_t kDraws = 65536;
  const float down = value(draw(x, 0)), up = value(draw(x, kDraws - 1));
  CHECK(std::abs(down) <= std::abs(x) && std::abs(x) <= std::abs(up));
  uint32_t ups = 0;
  for (uint32_t random = 0; random < kDraws; ++random) {
    const float drawn = value(draw(x, random));
    CHECK(drawn == down || drawn == up);
    ups += drawn == up && up != down;
  }
  const double mean = down + (static_cast<double>(up) - down) * ups / kDraws;
  CHECK_EQ(mean, static_cast<double>(x));
}

void TestDrawsHaveTheNumberAsTheirMean() {
  const auto half = [](float x) {
    CheckDraws(x, gmeta::portable::DrawHalf, gmeta::portable::FromHalf);
  };
  const auto bfloat = [](float x) {
    CheckDraws(x, gmeta::portable::DrawBfloat, gmeta::portable::FromBfloat);
  };
  std::mt19937 random(6);
  for (int i = 0; i < 300; ++i) {
    const float fraction = static_cast<float>(random() >> 8) / 16777216.0f;  // in [0, 1)
    const float sign = i % 2 == 0 ? 1.0f : -1.0f;
    half(sign * std::ldexp(1.0f + fraction, static_cast<int>(random() % 29) - 14));
    // Below 2^-14, in the 2^-40 that the bits tell apart.
    half(sign * std::ldexp(static_cast<float>(random() % (1 << 24)), -40));
    bfloat(sign * std::ldexp(1.0f + fraction, static_cast<int>(random() % 200) - 100));
  }
  for (const float x : {0.0f, -0.0f, 1.0f, -65504.0f, std::ldexp(1.0f, -24), 0.0009765625f}) {
    half(x);
  }
  for (uint32_t i = 0; i < 65536; ++i) {  // what a half holds stays
    const float x = gmeta::portable::FromHalf(static_cast<uint16_t>(i));
    if ((i & 0x7c00) != 0x7c00) CHECK_EQ(gmeta::portable::DrawHalf(x, 65535), i);
    const float y = gmeta::portable::FromBfloat(static_cast<uint16_t>(i));
    if (y == y) CHECK_EQ(gmeta::portable::DrawBfloat(y, 65535), i);
  }
  CHECK_EQ(gmeta::portable::DrawHalf(1e30f, 65535), 0x7bff);
  CHECK_EQ(gmeta::portable::DrawHalf(-kInfinity, 0), 0xfbff);
  CHECK_EQ(gmeta::portable::DrawHalf(1e-40f, 65535), 0);
  CHECK(std::isnan(gmeta::portable::FromHalf(gmeta::portable::DrawHalf(NAN, 7))));
  CHECK(std::isnan(gmeta::portable::FromBfloat(gmeta::portable::DrawBfloat(NAN, 65535))));
}

// Rows of any width and any number of slots, against the counters that half_rounding.h names.
void TestARowIsDrawnColumnByColumn() {
  const gmeta::HalfRounding rounding{true, 0x123456789abcdefull};
  std::mt19937 random(7);
  for (const size_t dim : {1, 3, 4, 16, 67, 128, 130, 300}) {
    for (const size_t slots : {size_t{0}, size_t{1}, dim, 2 * dim}) {
      std::vector<float> numbers(dim + slots);
      for (float& x : numbers) x = std::ldexp(static_cast<float>(random()), -33);
      std::vector<uint16_t> weights(dim), state(slots);
      const int64_t key = static_cast<int64_t>(random()) << 20;
      rounding.Round(key, 9, numbers.data(), dim, numbers.data() + dim, slots, weights.data(),
                     state.data());
      const auto word = [&](size_t column, uint32_t above) {
        uint32_t words[4];
        const auto block = static_cast<uint32_t>(column / 4) | above;
        gmeta::Philox4x32<1>(rounding.seed, gmeta::HalfRounding::CounterOf(block, key, 9), words);
        return words[column % 4];
      };
      for (size_t i = 0; i < dim; ++i) {
        CHECK_EQ(weights[i], gmeta::portable::DrawHalf(numbers[i], word(i, 0) & 0xffff));
      }
      for (size_t i = 0; i < slots; ++i) {
        const uint32_t bits = i < dim ? word(i, 0) >> 16 : word(i - dim, 1u << 31) & 0xffff;
        CHECK_EQ(state[i], gmeta::portable::DrawBfloat(numbers[dim + i], bits));
      }
    }
  }
}

}  // namespace

int main() {
  TestEveryHalf();
  TestRounding();
  TestRandomBitsAgree();
  TestBfloats();
  TestManyBfloatsAreAsOne();
  TestDrawsHaveTheNumberAsTheirMean();
  TestARowIsDrawnColumnByColumn();
}
