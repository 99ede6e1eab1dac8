// Rows that cool down (ops/table/core/half_rule.h): which they are, against the definition in
// floating point and a model by key; and that a table restored from a save, whole or in increments,
// goes on as the one that was saved.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::HalfRule;
using gmeta::RowHeader;
using gmeta::Table;
using gmeta::TableOptions;

namespace {

constexpr size_t kDim = 3;

void TestTheEffectiveFrequencyHalves() {
  for (const uint32_t half_life : {1u, 2u, 7u, 1000u, HalfRule::kLongestHalfLife}) {
    const HalfRule rule{10, half_life};
    for (const uint32_t doublings : {0u, 1u, 5u, 28u}) {
      const RowHeader header{10u << doublings, 5};
      const uint64_t cold = 5 + (doublings + 1) * uint64_t{half_life} + 1;
      CHECK(!rule.IsToBeHalf(header, 5 + (doublings + 1) * uint64_t{half_life}));
      CHECK(rule.IsToBeHalf(header, cold));
      CHECK(rule.IsToBeHalf(header, cold + 200 * uint64_t{half_life}));
    }
    CHECK(!rule.IsToBeHalf({10, 5}, 5));
    CHECK(!rule.IsToBeHalf({10, 5}, 0));  // used after the sweep
    CHECK(rule.IsToBeHalf({9, 5}, 0));
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const auto below = [&](uint32_t bound) { return static_cast<uint32_t>(random() % bound); };
    const HalfRule rule{below(1000) + 2, below(500) + 1};
    const RowHeader header{rule.half_below + below(100000), 7};
    const uint32_t idle = below(10000);
    const double whole = idle / rule.half_life, rest = idle % rule.half_life;
    const double effective =
        header.frequency * std::exp2(-whole) * (1.0 - rest / (2.0 * rule.half_life));
    const double threshold = rule.half_below / 2.0;
    if (std::abs(effective / threshold - 1.0) < 1e-12) continue;
    CHECK_EQ(rule.IsToBeHalf(header, 7 + uint64_t{idle}), effective < threshold);
  }
  CHECK(!HalfRule{10}.IsToBeHalf({10, 0}, 1000000));
}

void TestTheLatestSweepIsTheLastThatWasDue() {
  for (const uint64_t steps : {0, 1, 2, 5, 64, 100}) {
    for (const uint64_t shard : {0, 1, 13, 63}) {
      const gmeta::SweepSchedule sweeps(steps, shard, 64);
      uint64_t latest = 0;
      for (uint64_t step = 1; step < 500; ++step) {
        if (sweeps.IsDue(step)) latest = step;
        CHECK_EQ(sweeps.Latest(step), latest);
      }
    }
  }
}

struct Saved {
  std::vector<int64_t> keys, frequency, last_step;
  std::vector<float> rows, slots;
  int64_t step = 0;

  gmeta::ConstRecordColumns columns() const {
    return {keys.data(), rows.data(), slots.data(), frequency.data(), last_step.data()};
  }
};

// The records that are at `min_last_step` or later, sorted.
Saved Save(Table* table, uint32_t min_last_step = 0) {
  Saved s;
  std::vector<int64_t> splits(gmeta::kLogicalShards + 1), others(splits), waiting(splits),
      live(gmeta::kLogicalShards);
  const auto allocate = [&](const gmeta::ShardExportSizes& sizes) {
    for (auto* column : {&s.keys, &s.frequency, &s.last_step}) column->resize(sizes.rows);
    s.rows.resize(sizes.rows * kDim);
    s.slots.resize(sizes.rows * table->slot_floats());
    s.step = sizes.step;
    return std::optional(gmeta::ShardExportColumns{
        {s.keys.data(), s.rows.data(), s.slots.data(), s.frequency.data(), s.last_step.data()},
        splits.data(),
        nullptr,
        others.data(),
        live.data(),
        nullptr,
        nullptr,
        waiting.data()});
  };
  CHECK(table->ExportShards({0, gmeta::kLogicalShards}, min_last_step, allocate, Serial()));
  return s;
}

TableOptions Options(const HalfRule& half, bool prior) {
  TableOptions options;
  options.dim = kDim;
  options.half = half;
  options.round_at_random = true;
  options.optimizer = gmeta::Adam{0.9, 0.99, 1e-7};
  options.initializer = {gmeta::Initializer::Kind::kUniform, -1.0f, 1.0f, 7};
  options.log2_shards = 2;
  if (prior) options.prior = gmeta::RowPrior({0.1f, 0.0f, 0.2f});
  return options;
}

uint64_t HalvesOf(const Saved& saved, const HalfRule& rule) {
  uint64_t halves = 0;
  for (size_t i = 0; i < saved.keys.size(); ++i) {
    const uint64_t shard = gmeta::MurmurHash3(saved.keys[i]) >> 62;
    const RowHeader header{static_cast<uint32_t>(saved.frequency[i]),
                           static_cast<uint32_t>(saved.last_step[i])};
    halves +=
        rule.IsToBeHalf(header, rule.Sweeps(shard, 4).Latest(static_cast<uint64_t>(saved.step)));
  }
  return halves;
}

void CheckSame(Table* a, Table* b) {
  const Saved mine = Save(a), other = Save(b);
  CHECK(mine.keys == other.keys && mine.frequency == other.frequency &&
        mine.last_step == other.last_step && mine.step == other.step);
  CHECK(mine.rows == other.rows && mine.slots == other.slots);
  CHECK_EQ(a->Statistics().half_rows, b->Statistics().half_rows);
}

void TestARestoredTableGoesOn(const HalfRule& rule, bool prior, uint32_t seed) {
  std::mt19937 random(seed);
  Table table(Options(rule, prior));
  Saved base;
  uint64_t cold = 0, left_out = 0;
  std::optional<Table> other;
  const auto step = [&](uint64_t draw) {
    std::vector<int64_t> keys(random() % 60);
    // Some keys come all the time, some in spells.
    for (int64_t& key : keys) {
      key = static_cast<int64_t>(random() % 3 == 0 ? random() % 20
                                                   : 1000 + draw / 40 % 3 * 100 + random() % 60);
    }
    std::vector<float> rows(keys.size() * kDim), gradients(rows.size());
    for (float& g : gradients) g = static_cast<float>(random() % 200) / 100.0f - 1.0f;
    const bool looks_up = random() % 6 != 0, updates = random() % 6 != 0;
    for (Table* each : {&table, other ? &*other : nullptr}) {
      if (each == nullptr) continue;
      if (looks_up) each->Lookup(keys.data(), keys.size(), true, rows.data(), Threads{2});
      if (updates) each->Update(keys.data(), gradients.data(), keys.size(), 0.01f, Threads{2});
    }
  };
  for (uint64_t draw = 0; draw < 400; ++draw) {
    step(draw);
    const Saved saved = Save(&table);
    CHECK_EQ(table.Statistics().half_rows, HalvesOf(saved, rule));
    cold += HalvesOf(saved, rule) - HalvesOf(saved, {rule.half_below});
    if (draw % 50 == 10) base = saved;
    if (draw % 50 == 45) {      // a full save, and what has changed since
      if (prior) base = saved;  // increments don't have all frequencies of a table with a prior
      other.emplace(Options(rule, prior));
      other->Replace(base.columns(), base.keys.size(), saved.step, Serial());
      const Saved changed = Save(&table, static_cast<uint32_t>(base.step));
      left_out += saved.keys.size() - changed.keys.size();
      other->Merge(changed.columns(), changed.keys.size(), Serial());
    }
    if (other) CheckSame(&table, &*other);
  }
  CHECK(cold > 0 && (left_out > 0 || prior));
}

}  // namespace

int main() {
  TestTheEffectiveFrequencyHalves();
  TestTheLatestSweepIsTheLastThatWasDue();
  uint32_t seed = 0;
  for (const bool prior : {false, true}) {
    for (const HalfRule& rule :
         {HalfRule{3, 4}, HalfRule{5, 17}, HalfRule{2, 1}, HalfRule{4, 40}}) {
      TestARestoredTableGoesOn(rule, prior, ++seed);
    }
  }
}
