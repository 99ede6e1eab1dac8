// Half rows on a GPU (ops/table/gpu/device/mixed_rows.cuh) are those of the CPU's table: the
// numbers in a word, when a row ends to be half, and how records lie in memory.

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "ops/common/halves/half.h"
#include "ops/table/core/half_rule.h"
#include "ops/table/gpu/device/half_words.h"
#include "ops/table/gpu/device/row_geometry.h"
#include "ops/table/host/rows.h"
#include "tests/native/check.h"

using gmeta::Bfloat16;
using gmeta::Float16;
using gmeta::HalfRule;
using gmeta::RowGeometry;
using gmeta::RowLayout;

namespace {

// Of any magnitude, the odd ones among them.
std::vector<float> Floats(size_t n) {
  std::mt19937 random(3);
  std::vector<float> floats = {
      0.0f,   -0.0f, 65504.0f, 65519.0f, 65520.0f,
      -1e30f, 6e-8f, 2e-8f,    1e-40f,   gmeta::portable::FloatOf(0x7f800000)};
  while (floats.size() < n) {
    const float x = gmeta::portable::FloatOf(random());
    if (x == x) floats.push_back(x);  // of NaNs, processors keep other bits
  }
  return floats;
}

template <class Number, class ToArray, class FromArray>
void CheckWords(const ToArray& to_array, const FromArray& from_array) {
  const std::vector<float> floats = Floats(20000);
  std::vector<uint16_t> halves(floats.size());
  to_array(floats.data(), floats.size(), halves.data());
  std::vector<float> expected(floats.size());
  from_array(halves.data(), halves.size(), expected.data());
  for (size_t i = 0; i < floats.size(); i += 2) {
    const uint32_t word = gmeta::PairOf<Number>(floats[i], floats[i + 1]);
    CHECK_EQ(std::memcmp(&word, halves.data() + i, sizeof word), 0);
    const float found[] = {gmeta::FirstOf<Number>(word), gmeta::SecondOf<Number>(word)};
    CHECK_EQ(std::memcmp(found, expected.data() + i, sizeof found), 0);
  }
}

void TestWordsHoldWhatArraysHold() {
  CheckWords<Float16>([](auto... a) { gmeta::ToHalves(a...); },
                      [](auto... a) { gmeta::FromHalves(a...); });
  CheckWords<Bfloat16>([](auto... a) { gmeta::ToBfloats(a...); },
                       [](auto... a) { gmeta::FromBfloats(a...); });
}

// Uses that come in any portions, as the lanes of a warp add them: one portion ends it, that in
// which the CPU's table promotes the row.
void TestOnePortionOfUsesEndsARarity() {
  std::mt19937 random(4);
  for (int round = 0; round < 2000; ++round) {
    const HalfRule rule{static_cast<uint32_t>(random() % 60 + 2)};
    const RowLayout layout(3, 3);
    gmeta::RowArenas arenas(layout);
    gmeta::MixedRows rows(layout, rule, rule.Sweeps(0, 1), {}, &arenas, gmeta::RowStore::kMostRows);
    uint32_t row = rows.Allocate({0, 0}, 0);
    *rows.header(row) = {0, 0};
    rows.Write(row, [](float* weights, float* slots) {
      for (int i = 0; i < 3; ++i) weights[i] = slots[i] = 0.0f;
    });
    int ends = 0;
    for (uint32_t before = 0; before < 80;) {
      const uint32_t uses = random() % 33;
      const bool ended = rule.EndsRarity(before, uses);
      const bool was_half = rows.IsHalf(row);
      for (uint32_t i = 0; i < uses; ++i) row = rows.Touch(row, 1, true);
      CHECK_EQ(ended, was_half && !rows.IsHalf(row));
      before += uses;
      CHECK_EQ(rows.IsHalf(row), rule.IsRare(before));
      ends += ended;
    }
    CHECK_EQ(ends, 1);
  }
  const HalfRule last{UINT32_MAX};
  CHECK(last.EndsRarity(UINT32_MAX - 1, 1));
  CHECK(last.EndsRarity(UINT32_MAX - 3, 1u << 30));
  CHECK(!last.EndsRarity(UINT32_MAX, 1));
}

void TestARecordHasRoomForItsNumbers() {
  for (const size_t dim : {1, 3, 4, 7, 8, 64, 260, 1 << 20}) {
    for (const size_t slots : {size_t{0}, size_t{1}, dim, 2 * dim}) {
      const RowLayout layout(dim, slots);
      const RowGeometry full = RowGeometry::OfFull(layout, 0);
      const RowGeometry half = RowGeometry::OfHalf(layout, 0);
      CHECK(full.stride >= dim + slots && full.stride < dim + slots + 4);
      CHECK(2 * half.stride >= full.stride && 2 * half.stride <= full.stride + 1);
      if (dim % 4 == 0) {  // vectors of 16 bytes, and of 8
        CHECK_EQ(full.stride % 4, 0u);
        CHECK_EQ(half.stride % 2, 0u);
      }
      for (const RowGeometry& each : {full, half}) {
        CHECK_EQ(each.block_bytes() % 256, 0u);
        CHECK(each.block_rows() >= 32);
        CHECK(each.block_bytes() >= each.block_rows() * (4 * each.stride + 8));
        CHECK(each.block_bytes() <= size_t{4} << 20 || each.block_rows() == 32);
      }
      if (dim == 64) {
        CHECK_EQ(half.block_rows(), 2 * full.block_rows());
      }
      for (const uint64_t rows : {1, 256, 1000, 4096}) {  // of a bounded number in GPU memory
        const uint64_t most = RowGeometry::OfFull(layout, rows).block_rows();
        CHECK(most == 32 || (most <= rows / 8 && most <= full.block_rows()));
      }
    }
  }
}

void TestTheGpusShare() {
  CHECK_EQ(gmeta::NearBlocks(7, 32, 1000, 0), 7u);  // no bound
  CHECK_EQ(gmeta::NearBlocks(7, 32, 0, 100), 4u);   // a block that begins within it
  CHECK_EQ(gmeta::NearBlocks(7, 32, 96, 100), 1u);
  CHECK_EQ(gmeta::NearBlocks(7, 32, 128, 100), 0u);
  CHECK_EQ(gmeta::NearBlocks(2, 32, 0, 1000), 2u);
  CHECK_EQ(gmeta::NearFullRows(0), 0u);
  CHECK_EQ(gmeta::NearFullRows(1), 1u);
  // Full rows and half ones together take what was allowed.
  const RowLayout layout(64, 128);
  const RowGeometry full = RowGeometry::OfFull(layout, 0);
  const RowGeometry half = RowGeometry::OfHalf(layout, 0);
  const uint64_t rows = 1000;
  CHECK(gmeta::NearFullRows(rows) * full.stride + rows * half.stride <= rows * full.stride);
}

}  // namespace

int main() {
  TestWordsHoldWhatArraysHold();
  TestOnePortionOfUsesEndsARarity();
  TestARecordHasRoomForItsNumbers();
  TestTheGpusShare();
}
