#include "ops/table/core/key_index.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
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

// The first keys from 0 on whose home is the given group, of this many.
std::vector<int64_t> KeysAtHome(uint64_t home, uint64_t groups, size_t count) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < count; ++key) {
    if ((MurmurHash3(key) & (groups - 1)) == home) keys.push_back(key);
  }
  return keys;
}

void TestMurmurHash3IsTheFinalizer() {
  CHECK_EQ(MurmurHash3(0), uint64_t{0});
  CHECK_EQ(MurmurHash3(1), uint64_t{0xb456bcfc34c2cb2c});
}

void TestTagMatchFormsAgree() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200000; ++round) {
    uint8_t tags[kTagWidth];
    const uint64_t word = random();
    for (int i = 0; i < kTagWidth; ++i) {
      const uint8_t byte = static_cast<uint8_t>(word >> (8 * i));
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
    CHECK_EQ(gmeta::MatchEmpty(tags), full ^ 0xff);
    CHECK_EQ(gmeta::portable::MatchTag(tags, tag), match);
    CHECK_EQ(gmeta::portable::MatchFull(tags), full);
  }
}

// The traversal theorem: from any home, N probes visit each of N groups once.
void TestProbeVisitsEveryGroupOnce() {
  std::mt19937_64 random(1);
  for (uint64_t groups = 2; groups <= (1 << 14); groups *= 2) {
    std::vector<int64_t> keys(std::begin(kExtremes), std::end(kExtremes));
    for (int i = 0; i < 30; ++i) keys.push_back(static_cast<int64_t>(random()));
    for (int64_t multiple = 1; multiple < 4; ++multiple) {
      keys.push_back(multiple * static_cast<int64_t>(groups - 1));  // k mod (N - 1) = 0
      keys.push_back(multiple * static_cast<int64_t>(groups));
    }
    for (const int64_t key : keys) {
      const uint64_t step = gmeta::ProbeStep(key, groups);
      CHECK(step % 2 == 1 && step < groups);
      std::vector<bool> visited(groups, false);
      uint64_t at = MurmurHash3(key) & (groups - 1);
      for (uint64_t i = 0; i < groups; ++i, at = (at + step) & (groups - 1)) {
        CHECK(!visited[at]);
        visited[at] = true;
      }
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
// to be found, and once all are gone no count is left behind.
void TestErasingBreaksNoChain() {
  constexpr uint64_t kGroups = 16;
  const std::vector<int64_t> keys = KeysAtHome(3, kGroups, 60);
  for (uint32_t seed = 0; seed < 50; ++seed) {
    GroupTable table(kGroups);
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
        const GroupTable::Slot slot = table.Find(other, MurmurHash3(other));
        CHECK_EQ(slot.group != nullptr, i > gone);
        if (i > gone) CHECK_EQ(size_t{slot.group->rows[slot.index]}, order[i]);
      }
    }
    for (uint64_t at = 0; at < kGroups; ++at) CHECK_EQ(table.data()[at].overflow, 0u);
  }
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

void TestGrowthMovesNoRowAndIsSpreadOut(double growth_load) {
  KeyIndex index(growth_load);
  uint64_t drained_at = 0;
  for (uint32_t i = 0; i < 200000; ++i) {
    const int64_t key = static_cast<int64_t>(i) * 7919 - 1000;
    const uint64_t before = index.capacity();
    const bool was_draining = index.is_draining();
    index.Insert(key, MurmurHash3(key), i);
    CHECK(static_cast<double>(index.size()) <= growth_load * static_cast<double>(index.capacity()));
    if (index.capacity() != before) {
      CHECK(!was_draining);  // the growth before this one was over in time
      CHECK_EQ(index.capacity(), 2 * before);
      CHECK(static_cast<double>(index.size()) > growth_load * static_cast<double>(before));
      drained_at = i + before / kTagWidth;
    }
    if (i >= drained_at) CHECK(!index.is_draining());
    // Rows of keys long there, in the middle of a growth as well.
    for (uint32_t back = 1; back <= i; back *= 4) {
      const int64_t old = static_cast<int64_t>(i - back) * 7919 - 1000;
      CHECK_EQ(index.Find(old, MurmurHash3(old)), i - back);
    }
  }
}

// Shards that hold equally many keys: in each doubling of the keys, every one grows once, all at
// numbers of keys of their own, and together they have at most the memory of shards that grow as
// one.
void TestShardsOfATableGrowOneAfterAnother() {
  constexpr size_t kShards = 64;
  constexpr uint64_t kKeys = 8192;
  std::vector<KeyIndex> shards;
  for (size_t i = 0; i < kShards; ++i) shards.emplace_back(gmeta::GrowthLoad(i, kShards));
  std::unordered_map<uint64_t, size_t> grown;  // keys of a shard -> shards that grew then
  for (uint64_t n = 1; n <= kKeys; ++n) {
    uint64_t capacity = 0;
    for (KeyIndex& shard : shards) {
      const uint64_t before = shard.capacity();
      const int64_t key = static_cast<int64_t>(n);
      shard.Insert(key, MurmurHash3(key), 0);
      grown[n] += shard.capacity() != before;
      capacity += shard.capacity();
    }
    CHECK(8 * kShards * n >= 3 * capacity || n < 16);
  }
  size_t growths = 0;
  for (const auto& [n, count] : grown) {
    if (n > 1024) CHECK(count <= 1);
    growths += count;
  }
  CHECK_EQ(growths, kShards * 10);  // from 16 slots to 2^14
  for (const KeyIndex& shard : shards) CHECK_EQ(shard.capacity(), uint64_t{1} << 14);
}

void TestRandomOperationsAgainstAMap() {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    KeyIndex index;
    std::unordered_map<int64_t, uint32_t> model;
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
      CHECK_EQ(index.size(), uint64_t{model.size()});
    }
    size_t seen = 0;
    index.ForEach([&](int64_t key, uint32_t row) {
      CHECK_EQ(model.at(key), row);
      ++seen;
    });
    CHECK_EQ(seen, model.size());
    index.Clear();
    CHECK_EQ(index.size(), uint64_t{0});
    CHECK_EQ(index.Find(0, MurmurHash3(0)), kNoRow);
  }
}

void TestReserveMakesRoomAtOnce(double growth_load) {
  KeyIndex index(growth_load);
  index.Insert(-5, MurmurHash3(-5), 9);
  index.Reserve(10000);
  const uint64_t capacity = index.capacity();
  CHECK(capacity * 3 >= 10000 * 4 && capacity * 3 < 2 * 10000 * 4);
  for (int64_t key = 0; key < 9999; ++key) index.Insert(key, MurmurHash3(key), 0);
  CHECK_EQ(index.capacity(), capacity);
  CHECK_EQ(index.Find(-5, MurmurHash3(-5)), 9u);
}

}  // namespace

int main() {
  TestMurmurHash3IsTheFinalizer();
  TestTagMatchFormsAgree();
  TestProbeVisitsEveryGroupOnce();
  TestEveryKeyIsValid();
  TestErasingBreaksNoChain();
  TestChurnLeavesNothingBehind();
  for (const double load : {0.5, 0.6015625, 0.75}) TestGrowthMovesNoRowAndIsSpreadOut(load);
  TestShardsOfATableGrowOneAfterAnother();
  TestRandomOperationsAgainstAMap();
  for (const double load : {0.5, 0.75}) TestReserveMakesRoomAtOnce(load);
}
