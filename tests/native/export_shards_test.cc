#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ops/table/core/removal_journal.h"
#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::kLogicalShards;
using gmeta::LogicalRange;
using gmeta::LogicalShard;
using gmeta::MurmurHash3;
using gmeta::RemovalJournal;
using gmeta::Table;
using gmeta::TableOptions;

namespace {

struct Shards {
  std::vector<int64_t> keys, frequency, last_step, row_splits, removed, removed_splits, live;
  std::vector<int64_t> waiting, waiting_counts, waiting_splits;
  std::vector<float> rows, slots;
  int64_t step;
  bool whole;
};

template <class ParallelFor>
Shards Export(Table* table, LogicalRange range, uint32_t min_last_step, const ParallelFor& on) {
  Shards s;
  CHECK(table->ExportShards(
      range, min_last_step,
      [&](const gmeta::ShardExportSizes& sizes) -> std::optional<gmeta::ShardExportColumns> {
        for (auto* column : {&s.keys, &s.frequency, &s.last_step}) column->resize(sizes.rows);
        for (auto* column : {&s.row_splits, &s.removed_splits, &s.waiting_splits}) {
          column->resize(range.size() + 1);
        }
        for (auto* column : {&s.waiting, &s.waiting_counts}) column->resize(sizes.waiting);
        s.rows.resize(sizes.rows * table->dim());
        s.slots.resize(sizes.rows * table->slot_floats());
        s.removed.resize(sizes.removed);
        s.live.resize(range.size());
        s.step = sizes.step;
        s.whole = sizes.journal_whole;
        return gmeta::ShardExportColumns{
            {s.keys.data(), s.rows.data(), s.slots.data(), s.frequency.data(), s.last_step.data()},
            s.row_splits.data(),
            s.removed.data(),
            s.removed_splits.data(),
            s.live.data(),
            s.waiting.data(),
            s.waiting_counts.data(),
            s.waiting_splits.data()};
      },
      on));
  return s;
}

constexpr LogicalRange kAll{0, kLogicalShards};

void Insert(Table* table, const std::vector<int64_t>& keys) {
  std::vector<float> rows(keys.size() * table->dim());
  table->Lookup(keys.data(), keys.size(), true, rows.data(), Serial());
}

void Step(Table* table, const std::vector<int64_t>& keys, float gradient) {
  const std::vector<float> gradients(keys.size() * table->dim(), gradient);
  table->Update(keys.data(), gradients.data(), keys.size(), 1.0f, Serial());
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys(end - begin);
  std::iota(keys.begin(), keys.end(), begin);
  return keys;
}

// Each range, however it cuts through the table's own shards, holds its keys in order, and their
// records.
void TestRangesHoldTheirRecordsInOrder() {
  for (const int log2_shards : {0, 3, 6, 10}) {
    TableOptions options;
    options.dim = 3;
    options.optimizer = gmeta::Adam{0.9, 0.999, 1e-7};
    options.initializer = {gmeta::Initializer::Kind::kNormal, 0.0f, 1.0f, 9};
    options.log2_shards = log2_shards;
    Table table(options);
    const std::vector<int64_t> keys = Range(-4000, 4000);
    Insert(&table, keys);
    Step(&table, Range(0, 1000), 0.5f);
    std::vector<float> expected(3);
    for (const LogicalRange range : {kAll, LogicalRange{0, 1}, LogicalRange{5, 40},
                                     LogicalRange{1000, 1024}, LogicalRange{7, 7}}) {
      const Shards s = Export(&table, range, 0, Threads{2});
      std::map<uint32_t, std::vector<int64_t>> model;
      for (const int64_t key : keys) model[LogicalShard(MurmurHash3(key))].push_back(key);
      CHECK_EQ(s.row_splits[range.size()], static_cast<int64_t>(s.keys.size()));
      for (uint32_t shard = range.first; shard < range.last; ++shard) {
        const auto begin = s.keys.begin() + s.row_splits[shard - range.first];
        const auto end = s.keys.begin() + s.row_splits[shard - range.first + 1];
        CHECK(std::vector<int64_t>(begin, end) == model[shard]);
        CHECK_EQ(s.live[shard - range.first], static_cast<int64_t>(model[shard].size()));
      }
      for (size_t i = 0; i < s.keys.size(); ++i) {
        table.Lookup(&s.keys[i], 1, false, expected.data(), Serial());
        CHECK(std::equal(expected.begin(), expected.end(), &s.rows[3 * i]));
        const bool updated = 0 <= s.keys[i] && s.keys[i] < 1000;
        CHECK_EQ(s.last_step[i], int64_t{updated});
        CHECK_EQ(s.frequency[i], int64_t{1});
        CHECK_EQ(s.slots[6 * i] != 0.0f, updated);
      }
    }
  }
}

void TestOnlyRowsOfLateSteps() {
  Table table(TableOptions{});
  Insert(&table, Range(0, 3000));
  for (int step = 0; step < 5; ++step) Step(&table, Range(step * 100, step * 100 + 50), 1.0f);
  const Shards s = Export(&table, kAll, 4, Serial());
  std::set<int64_t> found(s.keys.begin(), s.keys.end());
  std::set<int64_t> expected;
  for (const int64_t begin : {300, 400}) {
    for (int64_t key = begin; key < begin + 50; ++key) expected.insert(key);
  }
  CHECK(found == expected);
  CHECK_EQ(std::accumulate(s.live.begin(), s.live.end(), int64_t{0}), int64_t{3000});
  CHECK_EQ(s.step, int64_t{5});
}

// Keys that admission turns away, with their counts, whatever min_last_step is.
void TestWhoWaits() {
  for (const int log2_shards : {0, 6, 10}) {
    TableOptions options;
    options.admission = gmeta::AdmitByCount{3};
    options.log2_shards = log2_shards;
    Table table(options);
    Insert(&table, Range(0, 3000));
    Insert(&table, Range(0, 2000));
    Insert(&table, Range(0, 1000));
    std::map<int64_t, int64_t> found;
    for (const LogicalRange range : {LogicalRange{0, 100}, LogicalRange{100, 1024}}) {
      const Shards s = Export(&table, range, 7, Threads{2});
      CHECK(s.keys.empty());
      for (uint32_t shard = range.first; shard < range.last; ++shard) {
        for (int64_t i = s.waiting_splits[shard - range.first];
             i < s.waiting_splits[shard - range.first + 1]; ++i) {
          CHECK_EQ(LogicalShard(MurmurHash3(s.waiting[i])), shard);
          found[s.waiting[i]] = s.waiting_counts[i];
        }
      }
      CHECK_EQ(s.waiting_splits[range.size()], static_cast<int64_t>(s.waiting.size()));
    }
    std::map<int64_t, int64_t> expected;
    for (int64_t key = 1000; key < 3000; ++key) expected[key] = key < 2000 ? 2 : 1;
    CHECK(found == expected);
  }
}

void TestJournalTellsWhatIsGone() {
  Table table(TableOptions{});
  Insert(&table, Range(0, 2000));
  const std::vector<int64_t> early = Range(0, 10), late = Range(10, 30), both = Range(20, 40);
  table.Remove(early.data(), early.size(), Serial());
  CHECK(!table.JournalWhole());  // off
  table.StartJournal(1 << 16);
  table.Remove(early.data(), early.size(), Serial());  // absent: not noted
  table.Remove(late.data(), late.size(), Serial());
  const auto removed = [&](LogicalRange range) {
    const Shards s = Export(&table, range, 0, Threads{2});
    CHECK(s.whole);
    for (uint32_t shard = range.first; shard < range.last; ++shard) {
      const auto begin = s.removed.begin() + s.removed_splits[shard - range.first];
      const auto end = s.removed.begin() + s.removed_splits[shard - range.first + 1];
      CHECK(std::is_sorted(begin, end));
      CHECK(std::all_of(begin, end,
                        [&](int64_t key) { return LogicalShard(MurmurHash3(key)) == shard; }));
    }
    return std::set<int64_t>(s.removed.begin(), s.removed.end());
  };
  CHECK(removed(kAll) == std::set<int64_t>(late.begin(), late.end()));
  // That save failed: the next one has its removals too, each once, in any cut of the ranges.
  Insert(&table, both);
  table.Remove(both.data(), both.size(), Serial());
  std::set<int64_t> parts = removed({0, 333});
  parts.merge(removed({333, 1024}));
  const std::vector<int64_t> all = Range(10, 40);
  CHECK(parts == std::set<int64_t>(all.begin(), all.end()));
  // Noted between the copy of a range and the end of the save: for the next save.
  table.Remove(&all[0], 1, Serial());
  const int64_t last = 1500;
  table.Remove(&last, 1, Serial());
  table.DropCutRemovals();
  CHECK(removed(kAll) == std::set<int64_t>{last});
  table.DropCutRemovals();
  CHECK(removed(kAll).empty());

  const float row = 0;
  const int64_t key = 5, zero = 0;
  table.Merge({&key, &row, &row, &zero, &zero}, 1, Serial());
  CHECK(!table.JournalWhole());
  CHECK(!Export(&table, kAll, 0, Serial()).whole);
  table.StartJournal(1 << 16);
  CHECK(table.JournalWhole());
  table.StartJournal(0);
  CHECK(!table.JournalWhole());
}

void TestJournalIsBounded() {
  RemovalJournal journal;
  journal.Start(100);
  for (int i = 0; i < 100000; ++i) journal.Note(i % 40);  // doubles cost nothing in the end
  CHECK(journal.whole());
  CHECK(journal.bytes() <= 2 * 100 * sizeof(int64_t));
  std::vector<int64_t> keys;
  journal.Cut([](int64_t) { return true; }, [&](int64_t key) { keys.push_back(key); });
  CHECK(keys == Range(0, 40));
  for (int64_t i = 0; i < 1000; ++i) journal.Note(i);
  CHECK(!journal.whole());
  CHECK_EQ(journal.bytes(), size_t{0});
}

// While batches run: no record is torn, and what a range misses has a late step or is noted.
void TestExportsAmongBatches() {
  Table table(TableOptions{});
  const std::vector<int64_t> keys = Range(0, 2000), fleeting = Range(5000, 5400);
  Insert(&table, keys);
  table.StartJournal(1 << 20);
  std::atomic<bool> running{true};
  std::thread updates([&] {
    for (int round = 0; round < 150; ++round) Step(&table, keys, -1.0f);
    running = false;
  });
  std::thread churn([&] {
    while (running) {
      Insert(&table, fleeting);
      table.Remove(fleeting.data(), fleeting.size(), Serial());
    }
  });
  while (running) {
    for (uint32_t first = 0; first < kLogicalShards; first += 100) {
      const Shards s =
          Export(&table, {first, std::min(first + 100, kLogicalShards)}, 0, Threads{2});
      CHECK(s.whole);
      CHECK_EQ(std::accumulate(s.live.begin(), s.live.end(), int64_t{0}),
               static_cast<int64_t>(s.keys.size()));
      for (size_t i = 0; i < s.keys.size(); ++i) {
        if (s.keys[i] < 2000) CHECK_EQ(s.rows[i], static_cast<float>(s.step));
      }
    }
    table.DropCutRemovals();
  }
  updates.join();
  churn.join();
}

}  // namespace

int main() {
  TestRangesHoldTheirRecordsInOrder();
  TestOnlyRowsOfLateSteps();
  TestWhoWaits();
  TestJournalTellsWhatIsGone();
  TestJournalIsBounded();
  TestExportsAmongBatches();
}
