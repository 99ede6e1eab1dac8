#include "ops/table/core/index/key_index.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

#include "tests/native/check.h"

using gmeta::GroupTable;
using gmeta::KeyGroup;
using gmeta::KeyIndex;
using gmeta::kNoRow;
using gmeta::kTagWidth;
using gmeta::MurmurHash3;

namespace {

constexpr int64_t kExtremes[] = {
    std::numeric_limits<int64_t>::min(),     std::numeric_limits<int64_t>::min() + 1, -1, 0, 1,
    std::numeric_limits<int64_t>::max() - 1, std::numeric_limits<int64_t>::max()};

// The first keys from 0 on whose home in a table is the given group.
std::vector<int64_t> KeysAtHome(const GroupTable& table, uint64_t home, size_t count) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < count; ++key) {
    if (table.Home(MurmurHash3(key)) == home) keys.push_back(key);
  }
  return keys;
}

// The sizes that indexes of some places pass through, up to a bound, in ascending order.
std::vector<uint64_t> Sizes(uint64_t most_groups) {
  std::set<uint64_t> sizes;
  for (size_t shard = 0; shard < 8; ++shard) {
    KeyIndex index(gmeta::GrowthPlace(shard, 8));
    for (uint64_t keys = 1; index.capacity() / kTagWidth <= most_groups; keys += keys / 3 + 1) {
      sizes.insert(index.capacity() / kTagWidth);
      index.Reserve(keys);
    }
  }
  return {sizes.begin(), sizes.end()};
}

void TestMurmurHash3IsTheFinalizer() {
  CHECK_EQ(MurmurHash3(0), uint64_t{0});
  CHECK_EQ(MurmurHash3(1), uint64_t{0xb456bcfc34c2cb2c});
}

void TestTagMatchFormsAgree() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200000; ++round) {
    uint8_t tags[16];  // what comes after the tags has no influence
    for (uint8_t& other : tags) other = static_cast<uint8_t>(random());
    for (int i = 0; i < kTagWidth; ++i) {
      const uint8_t byte = tags[i];
      tags[i] = byte % 3 == 0 ? 0 : static_cast<uint8_t>(0x80 | (byte % 5));
    }
    const uint8_t tag = static_cast<uint8_t>(0x80 | (random() % 5));
    uint32_t match = 0, full = 0;
    for (int i = 0; i < kTagWidth; ++i) {
      match |= static_cast<uint32_t>(tags[i] == tag) << i;
      full |= static_cast<uint32_t>(tags[i] != 0) << i;
    }
    CHECK_EQ(gmeta::MatchTag(tags, tag), match);
    CHECK_EQ(gmeta::MatchFull(tags), full);
    CHECK_EQ(gmeta::MatchEmpty(tags), full ^ gmeta::kAllSlots);
    CHECK_EQ(gmeta::portable::MatchTag(tags, tag), match);
    CHECK_EQ(gmeta::portable::MatchFull(tags), full);
  }
}

void TestNextPrime() {
  const uint64_t primes[] = {2, 3, 5, 7, 11, 13, 17, 19, 23};
  uint64_t n = 0;
  for (const uint64_t prime : primes) {
    for (; n <= prime; ++n) CHECK_EQ(gmeta::NextPrime(n), prime);
  }
  CHECK_EQ(gmeta::NextPrime(uint64_t{1} << 28), uint64_t{268435459});
}

// The traversal theorem: from any home, N probes visit each of N groups once.
void TestProbeVisitsEveryGroupOnce() {
  std::mt19937_64 random(1);
  const std::vector<uint64_t> sizes = Sizes(1 << 14);
  CHECK(sizes.size() > 100);
  for (const uint64_t groups : sizes) {
    std::vector<uint64_t> hashes = {0, UINT64_MAX, 0xffffffff, uint64_t{0xffffffff} << 32};
    for (int i = 0; i < 10; ++i) hashes.push_back(random());
    const GroupTable table(groups);
    for (const uint64_t hash : hashes) {
      const uint64_t step = table.Step(hash);
      CHECK(step >= 1 && step < groups);
      std::vector<bool> visited(groups, false);
      uint64_t at = table.Home(hash);
      for (uint64_t i = 0; i < groups; ++i, at = table.Next(at, step)) {
        CHECK(!visited.at(at));
        visited[at] = true;
      }
    }
  }
}

// Keys in the order of their homes in one table are in the order of their homes in any other.
void TestHomesKeepTheirOrder() {
  std::mt19937_64 random(2);
  std::vector<uint64_t> hashes;
  for (int i = 0; i < 2000; ++i) hashes.push_back(random());
  std::sort(hashes.begin(), hashes.end(), [](uint64_t a, uint64_t b) {
    return static_cast<uint32_t>(a) < static_cast<uint32_t>(b);
  });
  for (const uint64_t groups : Sizes(1 << 12)) {
    const GroupTable table(groups);
    for (size_t i = 1; i < hashes.size(); ++i) {
      CHECK(table.Home(hashes[i - 1]) <= table.Home(hashes[i]));
    }
  }
}

void TestEveryKeyIsValid() {
  KeyIndex index;
  for (const int64_t key : kExtremes) CHECK_EQ(index.Find(key, MurmurHash3(key)), kNoRow);
  uint32_t row = 0;
  for (const int64_t key : kExtremes) index.Insert(key, MurmurHash3(key), row++);
  row = 0;
  for (const int64_t key : kExtremes) CHECK_EQ(index.Find(key, MurmurHash3(key)), row++);
  for (const int64_t key : kExtremes) CHECK(index.Erase(key, MurmurHash3(key)) != kNoRow);
  CHECK_EQ(index.size(), uint64_t{0});
}

// Keys that share a home overflow into groups of their own; erasing any of them leaves the others
// to be found, and once all are gone no count is left behind, unless it had reached its limit.
void TestErasingBreaksNoChain(uint64_t groups, size_t count, uint32_t seeds) {
  const std::vector<int64_t> keys = KeysAtHome(GroupTable(groups), 3, count);
  bool full = false;
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    GroupTable table(groups);
    for (size_t i = 0; i < keys.size(); ++i) {
      table.Insert(keys[i], MurmurHash3(keys[i]), static_cast<uint32_t>(i));
    }
    std::vector<size_t> order(keys.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (size_t gone = 0; gone < order.size(); ++gone) {
      const int64_t key = keys[order[gone]];
      table.Erase(table.Find(key, MurmurHash3(key)), MurmurHash3(key));
      for (size_t i = 0; i < order.size(); ++i) {
        const int64_t other = keys[order[i]];
        const GroupTable::Place found = table.Find(other, MurmurHash3(other));
        CHECK_EQ(found.group != nullptr, i > gone);
        if (i > gone) CHECK_EQ(size_t{found.slot().row}, order[i]);
      }
    }
    for (uint64_t at = 0; at < groups; ++at) {
      for (const uint8_t passed : table.data()[at].passed) {
        CHECK(passed == 0 || passed == UINT8_MAX);
        full |= passed != 0;
      }
    }
  }
  CHECK_EQ(full, count > 255 * KeyGroup::kClasses);
}

// After any number of erased and inserted keys, a table is as large and as quick to probe as a new
// one.
void TestChurnLeavesNothingBehind() {
  KeyIndex index;
  constexpr int64_t kLive = 1000;
  for (int64_t key = 0; key < kLive; ++key) index.Insert(key, MurmurHash3(key), 0);
  const uint64_t capacity = index.capacity();
  for (int64_t key = kLive; key < 500 * kLive; ++key) {
    CHECK(index.Erase(key - kLive, MurmurHash3(key - kLive)) != kNoRow);
    index.Insert(key, MurmurHash3(key), 0);
  }
  CHECK_EQ(index.size(), uint64_t{kLive});
  CHECK_EQ(index.capacity(), capacity);
}

void TestGrowthMovesNoRowAndIsSpreadOut(double place) {
  KeyIndex index(place);
  uint64_t drained_at = 0;
  for (uint32_t i = 0; i < 200000; ++i) {
    const int64_t key = static_cast<int64_t>(i) * 7919 - 1000;
    const uint64_t before = index.capacity();
    const bool was_draining = index.is_draining();
    index.Insert(key, MurmurHash3(key), i);
    const double load = static_cast<double>(index.size()) / static_cast<double>(index.capacity());
    CHECK(load <= gmeta::kMostLoad);
    if (index.capacity() != before) {
      CHECK(!was_draining);  // the growth before this one was over in time
      CHECK_EQ(index.size(), static_cast<uint64_t>(gmeta::kMostLoad * before) + 1);
      drained_at = i + before / kTagWidth / 4 + 8;
    }
    if (i >= drained_at) CHECK(!index.is_draining());
    // A small size is a prime well above 1.4 times the one before.
    if (i > 2500 && !index.is_draining()) CHECK(index.bytes() <= 28 * index.size());
    // Rows of keys long there, in the middle of a growth as well.
    for (uint32_t back = 1; back <= i; back *= 4) {
      const int64_t old = static_cast<int64_t>(i - back) * 7919 - 1000;
      CHECK_EQ(index.Find(old, MurmurHash3(old)), i - back);
    }
  }
}

// Shards that hold equally many keys grow one after another, and together they have the memory of
// the mean load at any time, old tables that drain among it.
void TestShardsOfATableGrowOneAfterAnother() {
  constexpr size_t kShards = 16;
  constexpr uint64_t kKeys = 40000;
  std::vector<KeyIndex> shards;
  for (size_t i = 0; i < kShards; ++i) shards.emplace_back(gmeta::GrowthPlace(i, kShards));
  uint64_t growths = 0;
  for (uint64_t n = 1; n <= kKeys; ++n) {
    uint64_t bytes = 0, grown = 0;
    for (KeyIndex& shard : shards) {
      const uint64_t before = shard.capacity();
      const int64_t key = static_cast<int64_t>(n);
      shard.Insert(key, MurmurHash3(key), 0);
      grown += shard.capacity() != before;
      bytes += shard.bytes();
    }
    if (n <= kKeys / 4) continue;
    growths += grown;
    CHECK(grown <= 1);
    CHECK(bytes <= 27 * kShards * n);
  }
  // Keys four times as many: log(4) / log(1.4) = 4.1 growths for each shard.
  CHECK(growths >= 4 * kShards && growths <= 5 * kShards);
}

void TestRandomOperationsAgainstAMap() {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    KeyIndex index(static_cast<double>(seed % 5) / 5);
    std::unordered_map<int64_t, uint32_t> model;
    uint64_t draining = 0;
    for (uint32_t i = 0; i < 20000; ++i) {
      // Few keys, multiples of 2^32: all their low bits are alike.
      const int64_t key = static_cast<int64_t>(random() % 3000 << 32) + (seed % 2 ? INT64_MIN : 0);
      const uint64_t hash = MurmurHash3(key);
      const auto found = model.find(key);
      CHECK_EQ(index.Find(key, hash), found == model.end() ? kNoRow : found->second);
      // Phases of growing and of shrinking.
      if (random() % 8 < (i / 4000 % 2 ? 2 : 6)) {
        if (found == model.end()) {
          index.Insert(key, hash, i);
          model[key] = i;
        }
      } else {
        CHECK_EQ(index.Erase(key, hash), found == model.end() ? kNoRow : found->second);
        model.erase(key);
      }
      if (i % 500 == 0) index.Drain(random() % 3);
      if (i == 7000 + 100 * seed) index.Reserve(2 * index.size());
      CHECK_EQ(index.size(), uint64_t{model.size()});
      draining += index.is_draining();
      if (!index.is_draining() && i + 1 < 20000 && i % 1000 != 0) continue;
      if (index.is_draining() && draining % 16 != 0) continue;
      size_t seen = 0;
      index.ForEach([&](int64_t key, uint32_t row) {
        CHECK_EQ(model.at(key), row);
        ++seen;
      });
      CHECK_EQ(seen, model.size());
    }
    CHECK(draining > 100);
    index.Clear();
    CHECK_EQ(index.size(), uint64_t{0});
    CHECK_EQ(index.Find(0, MurmurHash3(0)), kNoRow);
  }
}

// At once, in little more memory than needed, and without losing the index's place.
void TestReserveMakesRoomAtOnce(double place) {
  KeyIndex index(place);
  index.Insert(-5, MurmurHash3(-5), 9);
  index.Reserve(10000);
  const uint64_t capacity = index.capacity();
  CHECK(capacity * gmeta::kMostLoad >= 10000);
  CHECK(capacity * gmeta::kMostLoad <= 10000 * gmeta::kGrowthFactor * 1.01);
  for (int64_t key = 0; key < 9999; ++key) index.Insert(key, MurmurHash3(key), 0);
  CHECK_EQ(index.capacity(), capacity);
  CHECK_EQ(index.Find(-5, MurmurHash3(-5)), 9u);
  KeyIndex grown(place);
  for (int64_t key = 0; key < 10000; ++key) grown.Insert(key, MurmurHash3(key), 0);
  CHECK_EQ(grown.capacity(), capacity);
}

}  // namespace

int main() {
  TestMurmurHash3IsTheFinalizer();
  TestTagMatchFormsAgree();
  TestNextPrime();
  TestProbeVisitsEveryGroupOnce();
  TestHomesKeepTheirOrder();
  TestEveryKeyIsValid();
  TestErasingBreaksNoChain(17, 60, 50);
  TestErasingBreaksNoChain(263, 2000, 1);  // more keys than a count can hold
  TestChurnLeavesNothingBehind();
  for (const double place : {0.0, 0.3, 0.99}) TestGrowthMovesNoRowAndIsSpreadOut(place);
  TestShardsOfATableGrowOneAfterAnother();
  TestRandomOperationsAgainstAMap();
  for (const double place : {0.0, 0.5}) TestReserveMakesRoomAtOnce(place);
}
