// Stripes of events: what is written comes back, and nothing that is read does harm.

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "io/history/stripe.h"
#include "tests/native/check.h"

namespace gmeta::history {
namespace {

using Values = std::vector<int64_t>;

constexpr int64_t kGuard = 0x5a5a5a5a5a5a5a5a;

// Columns for which each form is the smallest.
std::vector<Values> Columns(size_t events) {
  std::mt19937_64 draw(events);
  std::vector<Values> columns(6, Values(events));
  for (size_t i = 0; i < events; ++i) {
    columns[0][i] = 3;
    columns[1][i] = static_cast<int64_t>(draw() % 1000);
    columns[2][i] =
        (i == 0 ? 0 : columns[2][i - 1]) + static_cast<int64_t>(i % 30 == 29 ? 86400 : draw() % 60);
    columns[3][i] = static_cast<int64_t>(draw() % 5) << 40;
    columns[4][i] = i % 3 == 1 ? static_cast<int64_t>(draw() >> 20) : 0;
    columns[5][i] = static_cast<int64_t>(draw());
  }
  return columns;
}

std::string Encode(const std::vector<Values>& columns) {
  std::vector<const int64_t*> pointers;
  for (const Values& column : columns) pointers.push_back(column.data());
  std::string stripe;
  AppendStripe(pointers.data(), pointers.size(), columns[0].size(), &stripe);
  return stripe;
}

void TestColumnsComeBack() {
  for (size_t events : {1, 2, 7, 8, 9, 100, 255, 256, 257, 5000}) {
    const std::vector<Values> columns = Columns(events);
    const std::string bytes = Encode(columns);
    Stripe stripe;
    const std::string more = bytes + "more";
    CHECK(stripe.Open(more) == StripeFault::kNone);
    CHECK_EQ(stripe.columns(), columns.size());
    CHECK_EQ(stripe.events(), events);
    CHECK_EQ(stripe.size(), bytes.size());
    for (size_t i = 0; i < columns.size(); ++i) {
      Values found(events);
      CHECK(stripe.Read(i, found.data()) == StripeFault::kNone);
      CHECK(found == columns[i]);
    }
  }
}

void TestHistoriesTakeFewBytes() {
  const std::vector<Values> columns = Columns(256);
  std::vector<size_t> sizes;
  for (const Values& column : columns) {
    std::string made;
    AppendColumn(column.data(), column.size(), &made);
    sizes.push_back(made.size());
  }
  CHECK_EQ(sizes[0], size_t{2});
  CHECK(sizes[1] <= 256 * 10 / 8 + 8);
  CHECK(sizes[2] <= 256 * 6 / 8 + 16 + 8 * 4);  // 8 pauses of a day among steps of a minute at most
  CHECK(sizes[3] <= 256 * 3 / 8 + 40);
  CHECK(sizes[4] <= 256 / 8 + 86 * 44 / 8 + 16);
  CHECK(sizes[5] <= 256 * 8 + 16);
}

void TestEveryDamagedBitIsFound() {
  const std::vector<Values> columns = Columns(40);
  const std::string sound = Encode(columns);
  for (size_t bit = 0; bit < 8 * sound.size(); ++bit) {
    std::string bytes = sound;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << (bit % 8));
    Stripe stripe;
    bool found = stripe.Open(bytes) != StripeFault::kNone;
    Values out(40);
    for (size_t i = 0; i < columns.size() && !found; ++i) {
      found = stripe.Read(i, out.data()) != StripeFault::kNone;
    }
    CHECK(found);
  }
}

void TestEveryShortStripeIsFound() {
  const std::string sound = Encode(Columns(40));
  for (size_t size = 0; size < sound.size(); ++size) {
    // A copy of this size, so that a sanitizer sees what is read behind it.
    const std::vector<char> bytes(sound.begin(), sound.begin() + static_cast<ptrdiff_t>(size));
    Stripe stripe;
    CHECK(stripe.Open({bytes.data(), size}) == StripeFault::kTruncated);
  }
}

// Damage that no checksum covers: what is decoded may be wrong, and no byte beside it is touched.
void TestDamagedColumnsDoNoHarm() {
  std::mt19937_64 draw(1);
  for (size_t events : {1, 9, 256}) {
    for (const Values& column : Columns(events)) {
      std::string sound;
      AppendColumn(column.data(), events, &sound);
      for (int trial = 0; trial < 3000; ++trial) {
        std::vector<char> bytes(sound.begin(), sound.end());
        for (int changes = static_cast<int>(draw() % 3); changes >= 0; --changes) {
          bytes[draw() % bytes.size()] = static_cast<char>(draw());
        }
        if (draw() % 3 == 0) bytes.resize(draw() % (bytes.size() + 1));
        bytes.shrink_to_fit();
        Values out(events + 1, kGuard);
        ReadColumn({bytes.data(), bytes.size()}, events, out.data());
        CHECK_EQ(out.back(), kGuard);
      }
    }
  }
}

void TestNumbersOfAnyWidth() {
  std::mt19937_64 draw(2);
  for (int width = 0; width <= 64; width = width == kWidestLoad ? 64 : width + 1) {
    for (size_t count : {0, 1, 7, 8, 9, 65}) {
      std::vector<uint64_t> numbers(count), found(count);
      for (uint64_t& number : numbers) number = LowBits(draw(), width);
      std::vector<char> bytes(PackedSize(count, width));
      Pack(numbers.data(), count, width, bytes.data());
      Unpack(bytes.data(), count, width, found.data());
      CHECK(found == numbers);
    }
  }
}

}  // namespace
}  // namespace gmeta::history

int main() {
  gmeta::history::TestColumnsComeBack();
  gmeta::history::TestHistoriesTakeFewBytes();
  gmeta::history::TestEveryDamagedBitIsFound();
  gmeta::history::TestEveryShortStripeIsFound();
  gmeta::history::TestDamagedColumnsDoNoHarm();
  gmeta::history::TestNumbersOfAnyWidth();
}
