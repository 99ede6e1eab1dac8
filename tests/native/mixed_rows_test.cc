// Tables of two precisions: rows that change their record in the middle of a batch, against a map
// and under threads.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::Table;
using gmeta::TableOptions;

namespace {

constexpr size_t kDim = 5;  // odd: half records are padded

TableOptions Options(uint32_t half_below) {
  TableOptions options;
  options.dim = kDim;
  options.half.half_below = half_below;
  return options;
}

struct Model {
  float value = 0.0f;  // every element of the row
  int64_t frequency = 0;
};

struct Snapshot {
  std::vector<int64_t> keys, frequency, last_step;
  std::vector<float> rows;

  gmeta::ConstRecordColumns columns() const {
    return {keys.data(), rows.data(), nullptr, frequency.data(), last_step.data()};
  }
};

Snapshot Export(Table* table) {
  Snapshot s;
  CHECK(table->Export(
      [&](uint64_t n, int64_t) -> std::optional<gmeta::RecordColumns> {
        s.keys.resize(n);
        s.frequency.resize(n);
        s.last_step.resize(n);
        s.rows.resize(n * kDim);
        return gmeta::RecordColumns{s.keys.data(), s.rows.data(), nullptr, s.frequency.data(),
                                    s.last_step.data()};
      },
      Serial()));
  return s;
}

void CheckAgainst(const std::map<int64_t, Model>& model, Table* table, uint32_t half_below) {
  const Snapshot s = Export(table);
  CHECK_EQ(s.keys.size(), model.size());
  uint64_t half_rows = 0;
  for (size_t i = 0; i < s.keys.size(); ++i) {
    const Model& expected = model.at(s.keys[i]);
    CHECK_EQ(s.frequency[i], expected.frequency);
    for (size_t j = 0; j < kDim; ++j) CHECK_EQ(s.rows[i * kDim + j], expected.value);
    half_rows += expected.frequency < half_below;
  }
  CHECK_EQ(table->Statistics().half_rows, half_rows);
}

// Batches with many doubles, so that rows are made, promoted and, their half records being free,
// made in those, all in one block of a pass. Values are small integers: exact in float16.
void TestRandomOperationsAgainstAMap() {
  for (const uint32_t half_below : {2u, 3u, 7u}) {
    std::mt19937_64 random(half_below);
    TableOptions options = Options(half_below);
    options.log2_shards = 1;  // long passes
    Table table(options);
    std::map<int64_t, Model> model;
    for (int round = 0; round < 400; ++round) {
      std::vector<int64_t> keys(random() % 300);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % 150);
      const Threads threads{1 + random() % 2};
      std::vector<float> values(keys.size() * kDim);
      switch (random() % 4) {
        case 0:
        case 1: {
          const bool insert = random() % 3 > 0;
          table.Lookup(keys.data(), keys.size(), insert, values.data(), threads);
          for (size_t i = 0; i < keys.size(); ++i) {
            if (insert) ++model[keys[i]].frequency;
            const auto found = model.find(keys[i]);
            const float expected = found == model.end() ? 0.0f : found->second.value;
            for (size_t j = 0; j < kDim; ++j) CHECK_EQ(values[i * kDim + j], expected);
          }
          break;
        }
        case 2:
          for (size_t i = 0; i < keys.size(); ++i) {
            const float gradient = static_cast<float>(random() % 5) - 2.0f;
            std::fill_n(values.begin() + static_cast<ptrdiff_t>(i * kDim), kDim, gradient);
            const auto found = model.find(keys[i]);
            if (found != model.end()) found->second.value -= gradient;
          }
          table.Update(keys.data(), values.data(), keys.size(), 1.0f, threads);
          break;
        default:
          keys.resize(keys.size() / 3);
          table.Remove(keys.data(), keys.size(), threads);
          for (const int64_t key : keys) model.erase(key);
      }
      if (round % 20 == 0) CheckAgainst(model, &table, half_below);
    }
    // Into a table of another threshold, over rows of other precisions.
    Table other(Options(4));
    std::vector<int64_t> keys(150);
    std::vector<float> rows(keys.size() * kDim);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i / 2);
    other.Lookup(keys.data(), keys.size(), true, rows.data(), Serial());
    const Snapshot s = Export(&table);
    other.Merge(s.columns(), s.keys.size(), Serial());
    for (int64_t key = 0; key < 75; ++key) model.try_emplace(key, Model{0.0f, 2});
    CheckAgainst(model, &other, 4);
  }
}

// Threads promote, train and remove at once: no row is torn, and no update of a row that stays is
// lost.
void TestConcurrentPromotion() {
  constexpr int kThreads = 3, kRounds = 40;
  Table table(Options(kThreads * kRounds / 2));  // rows are promoted half way
  std::vector<int64_t> keys(500);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  const std::vector<float> gradients(keys.size() * kDim, -1.0f);
  std::vector<std::thread> threads;
  std::atomic<int> training{kThreads};
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<float> rows(keys.size() * kDim);
      for (int round = 0; round < kRounds; ++round) {
        table.Lookup(keys.data(), keys.size(), true, rows.data(), Threads{2});
        table.Update(keys.data(), gradients.data(), keys.size(), 1.0f, Serial());
        const int64_t passing = 1000 + thread * kRounds + round;
        table.Lookup(&passing, 1, true, rows.data(), Serial());
        table.Remove(&passing, 1, Serial());
      }
      --training;
    });
  }
  threads.emplace_back([&] {
    std::vector<float> rows(keys.size() * kDim);
    while (training > 0) {
      table.Lookup(keys.data(), keys.size(), false, rows.data(), Serial());
      for (size_t i = 0; i < rows.size(); i += kDim) {
        for (size_t j = 1; j < kDim; ++j) CHECK_EQ(rows[i + j], rows[i]);
      }
      table.Statistics();
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  std::vector<float> rows(keys.size() * kDim);
  table.Lookup(keys.data(), keys.size(), false, rows.data(), Serial());
  for (const float x : rows) CHECK_EQ(x, static_cast<float>(kThreads * kRounds));
  CHECK_EQ(table.Statistics().half_rows, uint64_t{0});
  CHECK_EQ(table.size(), uint64_t{500});
}

}  // namespace

int main() {
  TestRandomOperationsAgainstAMap();
  TestConcurrentPromotion();
}
