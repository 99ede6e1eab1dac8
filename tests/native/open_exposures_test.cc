#include "io/join/open_exposures.h"

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

#include "io/join/fingerprint_index.h"
#include "tests/native/check.h"

namespace {

using gmeta::join::AddWord;
using gmeta::join::FingerprintIndex;
using gmeta::join::Items;
using gmeta::join::kNone;
using gmeta::join::OpenExposures;
using gmeta::join::Output;
using gmeta::join::Rows;
using gmeta::join::Settings;

struct Item {
  uint64_t fingerprint;
};

// Inserts and removes items at random; many share their low bits, so runs are long and wrap around.
void IndexAgreesWithMap() {
  std::mt19937_64 random(1);
  Items<Item> items;
  FingerprintIndex<Item> index(items);
  std::unordered_map<uint64_t, uint32_t> model;
  for (int step = 0; step < 200000; ++step) {
    const uint64_t fingerprint = (random() % 5000) << 32 | (random() % 8 + 0xffffffffu - 6);
    const auto found = model.find(fingerprint);
    CHECK_EQ(index.Find(fingerprint), found == model.end() ? kNone : found->second);
    if (found == model.end()) {
      const uint32_t number = items.Take();
      items[number].fingerprint = fingerprint;
      index.Insert(number);
      model.emplace(fingerprint, number);
    } else if (model.size() > 600 || random() % 2 == 0) {
      index.Remove(found->second);
      items.Give(found->second);
      model.erase(found);
    }
    if (model.size() > 700) {  // the earliest that the map has
      const auto any = model.begin();
      index.Remove(any->second);
      items.Give(any->second);
      model.erase(any);
    }
    CHECK_EQ(items.size(), model.size());
  }
}

// Every exposure that isn't a repetition is released once, after its last example.
void RowsAreReleasedOnce(int64_t corrections) {
  std::mt19937_64 random(2);
  OpenExposures join(Settings{50, 5, corrections, 0.5});
  Output output;
  std::set<int64_t> held;
  std::map<int64_t, double> weight;
  int64_t key = 0;
  for (int call = 0; call < 2000; ++call) {
    const size_t n = random() % 40;
    std::vector<int64_t> keys(n), times(n);
    std::vector<uint8_t> sides(n), accepted(n);
    std::vector<int32_t> parts(n);
    std::vector<uint64_t> fingerprints(n);
    std::vector<float> labels(n, 1);
    size_t exposures = 0;
    for (size_t i = 0; i < n; ++i) {
      key += static_cast<int64_t>(random() % 3);
      keys[i] = key;
      times[i] = key - static_cast<int64_t>(random() % 4 == 0 ? random() % 80 : 0);
      sides[i] = random() % 2;
      exposures += sides[i] == 0;
      fingerprints[i] = AddWord(0, random() % 400);
    }
    int64_t next = join.next_row();
    output.Clear();
    join.Push(Rows{n, keys.data(), times.data(), sides.data(), parts.data(), fingerprints.data(),
                   labels.data()},
              accepted.data(), &output);
    for (size_t i = 0; i < exposures; ++i) {
      if (accepted[i] != 0) held.insert(next++);
    }
    CHECK_EQ(next, join.next_row());
    if (call == 1999) join.Finish(&output);
    for (size_t i = 0; i < output.rows.size(); ++i) {
      CHECK(held.count(output.rows[i]) == 1);
      weight[output.rows[i]] += output.weights[i];
    }
    for (const int64_t row : output.released) CHECK_EQ(held.erase(row), size_t{1});
  }
  CHECK(held.empty());
  CHECK_EQ(join.known() + join.open() + join.waiting(), size_t{0});
  for (const auto& [row, sum] : weight) CHECK_EQ(sum, 1.0);
  const auto& counts = join.counts();
  if (corrections == 0) {
    CHECK_EQ(static_cast<int64_t>(weight.size()), counts.positives + counts.negatives);
  }
  CHECK((counts.corrections > 0) == (corrections > 0));
}

}  // namespace

int main() {
  IndexAgreesWithMap();
  RowsAreReleasedOnce(0);
  RowsAreReleasedOnce(30);
  return 0;
}
