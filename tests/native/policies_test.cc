// Admission and eviction, each state against a plain model, and both in a table under threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::AdmitByChance;
using gmeta::AdmitByCount;
using gmeta::AdmitByFilter;
using gmeta::Eviction;
using gmeta::EvictionPolicy;
using gmeta::Table;
using gmeta::TableOptions;
using gmeta::TableStatistics;

namespace {

constexpr size_t kDim = 3;
constexpr uint64_t kRowCharge = 8 + 4 * kDim + Eviction::kIndexBytes;

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys(static_cast<size_t>(end - begin));
  std::iota(keys.begin(), keys.end(), begin);
  return keys;
}

std::vector<float> Lookup(Table* table, const std::vector<int64_t>& keys, bool insert = true) {
  std::vector<float> rows(keys.size() * kDim, NAN);
  table->Lookup(keys.data(), keys.size(), insert, rows.data(), Serial());
  return rows;
}

void Update(Table* table, const std::vector<int64_t>& keys, float gradient) {
  const std::vector<float> gradients(keys.size() * kDim, gradient);
  table->Update(keys.data(), gradients.data(), keys.size(), 1.0f, Serial());
}

std::set<int64_t> Keys(Table* table, const std::vector<int64_t>& candidates) {
  const auto found = std::make_unique<bool[]>(candidates.size());
  table->Contains(candidates.data(), candidates.size(), found.get(), Serial());
  std::set<int64_t> keys;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (found[i]) keys.insert(candidates[i]);
  }
  CHECK_EQ(keys.size(), table->size());
  return keys;
}

TableOptions Options() {
  TableOptions options;
  options.dim = kDim;
  return options;
}

Table Bounded(EvictionPolicy policy, uint64_t max_rows, uint64_t max_bytes = 0,
              uint32_t sweep_steps = 0) {
  TableOptions options = Options();
  options.eviction = Eviction{policy, max_rows, max_bytes, sweep_steps};
  return Table(options);
}

void TestExactCounts() {
  AdmitByCount::State state = AdmitByCount{4}.Begin(1);
  std::map<int64_t, uint32_t> model;
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const int64_t key = static_cast<int64_t>(random() % 3000) - 1500;
    const bool admitted = ++model[key] == 4;
    if (admitted) model.erase(key);
    CHECK_EQ(state.Admit(key, 0), admitted);
  }
  CHECK_EQ(state.counters(), uint64_t{model.size()});
  AdmitByCount::State copy = AdmitByCount{4}.Begin(1);
  state.ForEachCounter([&](int64_t key, uint32_t count) {
    CHECK_EQ(count, model.at(key));
    copy.SetCounter(key, count);
  });
  for (const auto& [key, count] : model) CHECK_EQ(copy.Admit(key, 0), count == 3);
  state.Clear();
  CHECK_EQ(state.counters(), uint64_t{0});
}

// A filter never admits late; with room, nearly never early; and its bytes are its whole state.
void TestFilterCounts() {
  const AdmitByFilter settings{3, 1000, 9.6, 7};
  AdmitByFilter::State state = settings.Begin(4);  // capacity 250
  int early = 0;
  for (int64_t key = 0; key < 250; ++key) {
    early += state.Admit(key, 0);
    early += state.Admit(key, 0);
    CHECK(state.Admit(key, 0));
    CHECK(state.Admit(key, 0));  // for ever
  }
  CHECK(early <= 5);
  CHECK_EQ(state.filter_bytes(), size_t{2400});
  AdmitByFilter::State copy = settings.Begin(4);
  std::copy_n(state.filter(), state.filter_bytes(), copy.filter());
  for (int64_t key = 0; key < 250; ++key) CHECK(copy.Admit(key, 0));
}

void TestChanceIsAFunctionOfSeedKeyAndStep() {
  AdmitByChance::State a = AdmitByChance{0.25, 7}.Begin(1), b = AdmitByChance{0.25, 8}.Begin(1);
  int admitted = 0, both = 0, next = 0;
  constexpr int kKeys = 40000;
  for (int64_t key = 0; key < kKeys; ++key) {
    const bool verdict = a.Admit(key, 5);
    CHECK_EQ(a.Admit(key, 5), verdict);
    admitted += verdict;
    both += verdict && b.Admit(key, 5);
    next += verdict && a.Admit(key, 6);
  }
  const auto near = [](int count, double expected) {
    return std::abs(count - expected) < 5 * std::sqrt(expected);
  };
  CHECK(near(admitted, kKeys / 4.0));
  CHECK(near(both, kKeys / 16.0) && near(next, kKeys / 16.0));
}

// 40 rows at most, one shard: its marks are 40 and 38.
void TestVictims() {
  Table lru = Bounded(gmeta::EvictByAge{}, 40);
  for (int64_t key = 0; key < 40; ++key) {
    Lookup(&lru, {key});
    Update(&lru, {}, 0);
  }
  Lookup(&lru, {0, 1, 2});
  Lookup(&lru, {100});  // 41 rows: the bound is kept before a batch, not after
  CHECK_EQ(lru.size(), uint64_t{41});
  Lookup(&lru, {101});
  std::vector<int64_t> candidates = Range(0, 102);
  std::set<int64_t> left = Keys(&lru, candidates);
  CHECK_EQ(left.size(), size_t{39});
  for (const int64_t key : {3, 4, 5}) CHECK(left.count(key) == 0);
  for (const int64_t key : {0, 1, 2, 6, 100, 101}) CHECK(left.count(key) == 1);
  CHECK_EQ(lru.Statistics().evictions, uint64_t{3});

  Table lfu = Bounded(gmeta::EvictByFrequency{}, 0, 40 * kRowCharge);
  Lookup(&lfu, Range(0, 41));
  Lookup(&lfu, {0, 1});  // down to 37.5 rows: the lowest keys of equal rank go, before it looks
  left = Keys(&lfu, candidates);
  CHECK(left.count(3) == 0 && left.count(0) == 1 && left.count(4) == 1);
  CHECK_EQ(lfu.Statistics().inserts, uint64_t{43});

  Table norm = Bounded(gmeta::EvictByNorm{2.0}, 0);
  Lookup(&norm, Range(0, 10));
  Update(&norm, {3, 4}, 1.5f);  // norm 2.6
  Update(&norm, {5}, 1.0f);     // norm 1.7
  CHECK_EQ(norm.Evict(Serial()), uint64_t{8});
  CHECK(Keys(&norm, candidates) == (std::set<int64_t>{3, 4}));
}

void TestExpiry() {
  Table table = Bounded(gmeta::EvictExpired{3}, 1000, 0, 2);  // one shard, swept at even steps
  Lookup(&table, {1, 2});
  Update(&table, {2}, 1.0f);  // step 1
  for (int step = 2; step <= 6; ++step) {
    Update(&table, {}, 0);
    // Key 1, of step 0, has expired at step 4; key 2, of step 1, at step 5, which is not swept.
    CHECK_EQ(table.size(), uint64_t(step < 4 ? 2 : step < 6 ? 1 : 0));
  }
  Table still = Bounded(gmeta::EvictExpired{3}, 1000);  // never swept by itself
  Lookup(&still, {1});
  for (int step = 0; step < 9; ++step) Update(&still, {}, 0);
  CHECK_EQ(still.size(), uint64_t{1});
  CHECK_EQ(still.Evict(Serial()), uint64_t{1});
}

// A full table in which everything is new stays within bound + batch, and its memory too.
void TestChurnUsesRowsAgain() {
  Table table = Bounded(gmeta::EvictByAge{}, 70000);  // 64 shards
  uint64_t bytes = 0;
  for (int64_t begin = 0; begin < 1000000; begin += 10000) {
    Lookup(&table, Range(begin, begin + 10000));
    Update(&table, {}, 0);
    CHECK(table.size() <= 80000);
    if (begin == 200000) bytes = table.Statistics().bytes;
  }
  CHECK(table.size() > 60000);
  CHECK(table.Statistics().bytes <= bytes + bytes / 8);
}

// Two filters merged: no count is below either's, none above that of a filter that has met all.
void TestMergedFilters() {
  for (const int log2_shards : {0, 4}) {
    TableOptions options = Options();
    options.admission = AdmitByFilter{5, 300, 4.0, 3};  // small, so that keys meet
    options.log2_shards = log2_shards;
    Table a(options), b(options), both(options), merged(options);
    std::mt19937_64 random(7);
    for (int round = 0; round < 40; ++round) {
      std::vector<int64_t> keys(40);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % 500);
      Lookup(round % 3 ? &a : &b, keys);
      Lookup(&both, keys);
    }
    const size_t bytes = a.filter_bytes();
    CHECK_EQ(a.filters(), size_t{1} << log2_shards);
    const auto filter = [&](Table* table, size_t shard) {
      std::vector<uint8_t> counters(bytes);
      table->ExportFilter(shard, counters.data());
      return counters;
    };
    const auto take = [&](Table* from, size_t shard) {
      const std::vector<uint8_t> counters = filter(from, shard);
      return merged.MergeAdmission({nullptr, nullptr, counters.data()}, 0, bytes, shard);
    };
    for (size_t shard = 0; shard < a.filters(); ++shard) CHECK(take(&a, shard) && take(&b, shard));
    for (size_t shard = 0; shard < a.filters(); ++shard) {
      const std::vector<uint8_t> x = filter(&a, shard), y = filter(&b, shard);
      const std::vector<uint8_t> most = filter(&both, shard), found = filter(&merged, shard);
      for (size_t i = 0; i < bytes; ++i) {
        CHECK_EQ(found[i], std::max(x[i], y[i]));
        CHECK(found[i] <= most[i]);
      }
    }
    const std::vector<uint8_t> counters(bytes);
    CHECK(!merged.MergeAdmission({nullptr, nullptr, counters.data()}, 0, bytes, a.filters()));
    CHECK(!merged.MergeAdmission({nullptr, nullptr, counters.data()}, 0, bytes - 1, 0));

    // Exact counts raise a key's own counters.
    Table counted(options);
    const int64_t key = 8, count = 4;
    CHECK(counted.MergeAdmission({&key, &count, nullptr}, 1, 0, 0));
    Lookup(&counted, {key});
    CHECK_EQ(counted.size(), uint64_t{1});
  }
}

// Threads insert, train, read, evict, save and clear at once. Rows are never torn, and the counts
// add up.
void TestConcurrentPolicies(gmeta::Admission admission, EvictionPolicy policy) {
  TableOptions options = Options();
  options.admission = std::move(admission);
  options.eviction = Eviction{policy, 3000, 0, 4};
  options.initializer = {gmeta::Initializer::Kind::kConstant, 2.0f, 0.0f, 0};
  Table table(options);
  std::atomic<int> training{3};
  std::atomic<uint64_t> looked_up{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(static_cast<uint64_t>(thread));
      for (int round = 0; round < 60; ++round) {
        std::vector<int64_t> keys(800);
        for (int64_t& key : keys) key = static_cast<int64_t>(random() % 9000);
        std::vector<float> rows(keys.size() * kDim);
        table.Lookup(keys.data(), keys.size(), true, rows.data(), Threads{2});
        for (size_t i = 0; i < rows.size(); i += kDim) {
          for (size_t j = 1; j < kDim; ++j) CHECK_EQ(rows[i + j], rows[i]);
        }
        looked_up += keys.size();
        Update(&table, keys, -1.0f);
        table.Remove(keys.data(), 10, Serial());
      }
      --training;
    });
  }
  threads.emplace_back([&] {
    while (training > 0) {
      table.Evict(Threads{2});
      table.Statistics();
      std::vector<int64_t> keys, counts;
      std::vector<uint8_t> filter;
      CHECK(table.ExportAdmission([&](uint64_t n, uint64_t bytes) {
        keys.resize(n);
        counts.resize(n);
        filter.resize(bytes);
        return std::optional(gmeta::AdmissionColumns{keys.data(), counts.data(), filter.data()});
      }));
      CHECK(table.ReplaceAdmission({keys.data(), counts.data(), filter.data()}, keys.size(),
                                   filter.size()));
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  const TableStatistics s = table.Statistics();
  CHECK_EQ(s.hits + s.misses, looked_up.load());
  CHECK_EQ(s.misses, s.inserts + s.rejects);
  CHECK_EQ(s.size, s.inserts - s.removes - s.evictions);
  CHECK(s.evictions > 0);
  table.Evict(Serial());
  CHECK(table.size() <= 3000);
}

}  // namespace

int main() {
  TestExactCounts();
  TestFilterCounts();
  TestChanceIsAFunctionOfSeedKeyAndStep();
  TestVictims();
  TestExpiry();
  TestChurnUsesRowsAgain();
  TestMergedFilters();
  TestConcurrentPolicies(gmeta::AdmitAll{}, gmeta::EvictByFrequency{});
  TestConcurrentPolicies(AdmitByCount{2}, gmeta::EvictByAge{});
  TestConcurrentPolicies(AdmitByFilter{2, 9000, 9.6, 7}, gmeta::EvictExpired{20});
  TestConcurrentPolicies(AdmitByChance{0.3, 1}, gmeta::EvictByNorm{3.0});
}
