#include "ops/table/host/table.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::Adam;
using gmeta::Initializer;
using gmeta::Sgd;
using gmeta::Table;
using gmeta::TableOptions;

namespace {

constexpr size_t kDim = 5;

TableOptions Options(gmeta::SparseOptimizer optimizer = Sgd{},
                     Initializer initializer = {Initializer::Kind::kConstant, 0.0f, 0.0f, 0}) {
  TableOptions options;
  options.dim = kDim;
  options.optimizer = optimizer;
  options.initializer = initializer;
  return options;
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys(end - begin);
  std::iota(keys.begin(), keys.end(), begin);
  return keys;
}

std::vector<float> Lookup(Table* table, const std::vector<int64_t>& keys, bool insert) {
  std::vector<float> rows(keys.size() * kDim, NAN);
  table->Lookup(keys.data(), keys.size(), insert, rows.data(), Serial());
  return rows;
}

struct Snapshot {
  std::vector<int64_t> keys, frequency, last_step;
  std::vector<float> rows, slots;
  int64_t step;

  gmeta::ConstRecordColumns columns() const {
    return {keys.data(), rows.data(), slots.data(), frequency.data(), last_step.data()};
  }
};

Snapshot Export(Table* table) {
  Snapshot s;
  CHECK(table->Export(
      [&](uint64_t n, int64_t step) -> std::optional<gmeta::RecordColumns> {
        s.keys.resize(n);
        s.frequency.resize(n);
        s.last_step.resize(n);
        s.rows.resize(n * table->dim());
        s.slots.resize(n * table->slot_floats());
        s.step = step;
        return gmeta::RecordColumns{s.keys.data(), s.rows.data(), s.slots.data(),
                                    s.frequency.data(), s.last_step.data()};
      },
      Serial()));
  return s;
}

void TestInitialRowsDependOnNothingButSeedAndKey() {
  const Initializer normal{Initializer::Kind::kNormal, 0.0f, 1.0f, 42};
  Table forward(Options(Sgd{}, normal)), backward(Options(Sgd{}, normal));
  std::vector<int64_t> keys = Range(-500, 20000);
  const std::vector<float> rows = Lookup(&forward, keys, true);
  std::vector<int64_t> reversed(keys.rbegin(), keys.rend());
  for (const int64_t key : reversed) Lookup(&backward, {key}, true);
  CHECK(Lookup(&backward, keys, false) == rows);
  Table untouched(Options(Sgd{}, normal));
  CHECK(Lookup(&untouched, keys, false) == rows);  // a miss without insert reads the same row
  CHECK_EQ(untouched.size(), uint64_t{0});
}

void TestStatisticsCount() {
  Table table(Options());
  Lookup(&table, Range(0, 100), true);
  Lookup(&table, Range(50, 150), true);
  Lookup(&table, Range(100, 300), false);
  const std::vector<int64_t> gone = {0, 1, 2, 2, 777};
  CHECK_EQ(table.Remove(gone.data(), gone.size(), Serial()), uint64_t{3});
  const std::vector<int64_t> updated = {1, 50, 50, 51};  // 1 is gone
  const std::vector<float> gradients(updated.size() * kDim, 1.0f);
  table.Update(updated.data(), gradients.data(), updated.size(), 0.5f, Serial());
  const gmeta::TableStatistics s = table.Statistics();
  CHECK_EQ(s.size, uint64_t{147});
  CHECK_EQ(s.hits, uint64_t{50 + 50});
  CHECK_EQ(s.misses, uint64_t{100 + 50 + 150});
  CHECK_EQ(s.inserts, uint64_t{150});
  CHECK_EQ(s.removes, uint64_t{3});
  CHECK_EQ(s.updates, uint64_t{2});
  CHECK_EQ(s.ignored, uint64_t{1});
  CHECK(s.capacity >= s.size && s.bytes > 147 * (8 + 4 * kDim));
  CHECK_EQ(table.step(), int64_t{1});
  CHECK(Lookup(&table, {50, 51, 52}, false)[0] == -1.0f);  // 50 stood there twice
}

// A key that is new and stands twice in a batch is inserted once.
void TestDoublesInALookup() {
  Table table(Options(Sgd{}, {Initializer::Kind::kUniform, 0.0f, 1.0f, 1}));
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 5000; ++i) keys.push_back(i % 37);
  const std::vector<float> rows = Lookup(&table, keys, true);
  CHECK_EQ(table.size(), uint64_t{37});
  for (size_t i = 37; i < keys.size(); ++i) {
    for (size_t j = 0; j < kDim; ++j) CHECK_EQ(rows[i * kDim + j], rows[(i - 37) * kDim + j]);
  }
}

// Random batches, threaded, against a map of doubles.
void TestRandomOperationsAgainstAMap() {
  std::mt19937_64 random(11);
  Table table(Options());
  std::map<int64_t, float> model;  // every element of a row is the same
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> keys(random() % 3000);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % 4000) - 2000;
    const Threads threads{1 + random() % 3};
    std::vector<float> values(keys.size() * kDim);
    switch (random() % 4) {
      case 0:
      case 1:
        table.Lookup(keys.data(), keys.size(), round % 2, values.data(), threads);
        for (size_t i = 0; i < keys.size(); ++i) {
          if (round % 2) model.emplace(keys[i], 0.0f);
          const auto found = model.find(keys[i]);
          const float expected = found == model.end() ? 0.0f : found->second;
          for (size_t j = 0; j < kDim; ++j) CHECK_EQ(values[i * kDim + j], expected);
        }
        break;
      case 2:
        for (size_t i = 0; i < keys.size(); ++i) {
          const float gradient = static_cast<float>(random() % 8);  // sums are exact
          std::fill_n(values.begin() + i * kDim, kDim, gradient);
          const auto found = model.find(keys[i]);
          if (found != model.end()) found->second -= gradient;
        }
        table.Update(keys.data(), values.data(), keys.size(), 1.0f, threads);
        break;
      default:
        keys.resize(keys.size() / 4);
        table.Remove(keys.data(), keys.size(), threads);
        for (const int64_t key : keys) model.erase(key);
        const auto found = std::make_unique<bool[]>(keys.size());
        table.Contains(keys.data(), keys.size(), found.get(), threads);
        for (size_t i = 0; i < keys.size(); ++i) CHECK(!found[i]);
    }
    CHECK_EQ(table.size(), uint64_t{model.size()});
  }
}

void TestRecordsTravelWhole() {
  Table from(Options(Adam{0.9, 0.999, 1e-7}, {Initializer::Kind::kNormal, 0.0f, 1.0f, 3}));
  const std::vector<int64_t> keys = Range(-3000, 3000);
  Lookup(&from, keys, true);
  Lookup(&from, Range(0, 10), true);
  std::vector<float> gradients(keys.size() * kDim);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = std::sin(static_cast<float>(i));
  from.Update(keys.data(), gradients.data(), keys.size(), 0.1f, Serial());
  const Snapshot saved = Export(&from);
  CHECK_EQ(saved.keys.size(), keys.size());
  CHECK_EQ(saved.step, int64_t{1});

  Table to(Options(Adam{0.9, 0.999, 1e-7}));
  Lookup(&to, Range(100000, 100500), true);  // replaced by the import
  to.Replace(saved.columns(), saved.keys.size(), saved.step, Threads{2});
  CHECK_EQ(to.size(), from.size());
  CHECK_EQ(to.step(), int64_t{1});
  // Equal slots and step: the next update has the same result too.
  from.Update(keys.data(), gradients.data(), keys.size(), 0.1f, Serial());
  to.Update(keys.data(), gradients.data(), keys.size(), 0.1f, Threads{2});
  CHECK(Lookup(&from, keys, false) == Lookup(&to, keys, false));
  for (size_t i = 0; i < saved.keys.size(); ++i) {
    const bool twice = saved.keys[i] >= 0 && saved.keys[i] < 10;
    CHECK_EQ(saved.frequency[i], int64_t{twice ? 2 : 1});
    CHECK_EQ(saved.last_step[i], int64_t{1});
  }

  // Merging keeps what it doesn't name, and the step.
  Lookup(&to, {900000}, true);
  Snapshot one = saved;
  one.keys = {keys[0]};
  one.rows.assign(kDim, 7.0f);
  to.Merge(one.columns(), 1, Serial());
  CHECK_EQ(to.size(), from.size() + 1);
  CHECK_EQ(to.step(), int64_t{2});
  CHECK(Lookup(&to, {keys[0]}, false)[0] == 7.0f);
}

// Writers add one to whole rows, so a row with unequal elements was torn, a wrong total is a lost
// update, and an export with unequal rows went through the middle of a batch.
void TestConcurrentBatches() {
  Table table(Options());
  const std::vector<int64_t> keys = Range(-600, 1400);
  Lookup(&table, keys, true);
  const std::vector<float> gradients(keys.size() * kDim, -1.0f);
  constexpr int kWriters = 3;
  constexpr int kRounds = 60;
  std::atomic<int> writing{kWriters};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        table.Update(keys.data(), gradients.data(), keys.size(), 1.0f, Threads{2});
      }
      --writing;
    });
  }
  threads.emplace_back([&] {  // grows the table meanwhile
    for (int64_t begin = 10000; writing > 0; begin += 500) {
      const std::vector<int64_t> more = Range(begin, begin + 500);
      Lookup(&table, more, true);
      table.Remove(more.data(), more.size() / 2, Serial());
    }
  });
  threads.emplace_back([&] {
    while (writing > 0) {
      const std::vector<float> rows = Lookup(&table, keys, writing % 2);
      for (size_t i = 0; i < rows.size(); i += kDim) {
        for (size_t j = 1; j < kDim; ++j) CHECK_EQ(rows[i + j], rows[i]);
      }
    }
  });
  threads.emplace_back([&] {
    while (writing > 0) {
      const Snapshot s = Export(&table);
      for (size_t i = 0; i < s.keys.size(); ++i) {
        if (s.keys[i] < 1400) CHECK_EQ(s.rows[i * kDim], static_cast<float>(s.step));
      }
      table.Statistics();
    }
  });
  for (std::thread& thread : threads) thread.join();
  const std::vector<float> rows = Lookup(&table, keys, false);
  for (const float x : rows) CHECK_EQ(x, static_cast<float>(kWriters * kRounds));
  CHECK_EQ(table.step(), int64_t{kWriters * kRounds});
}

// Several threads insert overlapping keys: each key has one row in the end.
void TestConcurrentInserts() {
  Table table(Options(Sgd{}, {Initializer::Kind::kUniform, -1.0f, 1.0f, 5}));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t begin = 0; begin < 20000; begin += 1000) {
        Lookup(&table, Range(begin - 100 * thread, begin + 1100), true);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(table.size(), uint64_t{20000 - 1000 + 1100 + 300});
  const Snapshot s = Export(&table);
  CHECK(Lookup(&table, s.keys, false) == s.rows);
}

}  // namespace

int main() {
  TestInitialRowsDependOnNothingButSeedAndKey();
  TestStatisticsCount();
  TestDoublesInALookup();
  TestRandomOperationsAgainstAMap();
  TestRecordsTravelWhole();
  TestConcurrentBatches();
  TestConcurrentInserts();
}
