// A table whose rows are mostly on disk is one whose rows are all in memory: drawn batches,
// removals, sweeps, saves, loads and snapshots on both, for each policy, optimizer and precision,
// compared to the last bit.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::Table;
using gmeta::TableOptions;

namespace {

constexpr size_t kDim = 6;
constexpr int64_t kKeys = 3000;

// All that ExportShards writes.
struct Saved {
  std::vector<int64_t> keys, frequency, last_step, splits, removed, removed_splits, live, waiting,
      counts, waiting_splits;
  std::vector<float> rows, slots;
  bool whole = false;
  bool operator==(const Saved& other) const {
    return std::tie(keys, frequency, last_step, splits, removed, removed_splits, live, waiting,
                    counts, waiting_splits, rows, slots, whole) ==
           std::tie(other.keys, other.frequency, other.last_step, other.splits, other.removed,
                    other.removed_splits, other.live, other.waiting, other.counts,
                    other.waiting_splits, other.rows, other.slots, other.whole);
  }
};

Saved Save(Table* table, uint32_t min_last_step) {
  Saved s;
  const gmeta::LogicalRange range{0, gmeta::kLogicalShards};
  const auto allocate = [&](const gmeta::ShardExportSizes& sizes) {
    for (auto* column : {&s.keys, &s.frequency, &s.last_step}) column->resize(sizes.rows);
    s.rows.resize(sizes.rows * kDim);
    s.slots.resize(sizes.rows * table->slot_floats());
    for (auto* column : {&s.splits, &s.removed_splits, &s.waiting_splits}) {
      column->resize(range.size() + 1);
    }
    s.removed.resize(sizes.removed);
    s.live.resize(range.size());
    s.waiting.resize(sizes.waiting);
    s.counts.resize(sizes.waiting);
    s.whole = sizes.journal_whole;
    return std::optional(gmeta::ShardExportColumns{
        {s.keys.data(), s.rows.data(), s.slots.data(), s.frequency.data(), s.last_step.data()},
        s.splits.data(),
        s.removed.data(),
        s.removed_splits.data(),
        s.live.data(),
        s.waiting.data(),
        s.counts.data(),
        s.waiting_splits.data()});
  };
  CHECK(table->ExportShards(range, min_last_step, allocate, Serial()));
  return s;
}

std::vector<int64_t> DrawKeys(std::mt19937_64* random, size_t n) {
  std::vector<int64_t> keys(n);
  for (int64_t& key : keys) {
    const double u = std::uniform_real_distribution<double>(0.0, 1.0)(*random);
    key = static_cast<int64_t>(kKeys * u * u * u);
  }
  return keys;
}

struct Pair {
  Table memory, tiered;
  std::mt19937_64 random;
  bool pushed = false;

  Pair(TableOptions options, const std::string& folder, uint64_t seed)
      : memory(options), tiered(WithDisk(options, folder)), random(seed) {}

  static TableOptions WithDisk(TableOptions options, const std::string& folder) {
    options.disk = gmeta::DiskTier{folder, 2 * (8 + 4 * kDim * 3) * kKeys / 100, 4096};  // 2% or so
    return options;
  }

  void Step() {
    const std::vector<int64_t> keys = DrawKeys(&random, 1 + random() % 300);
    const size_t n = keys.size();
    std::vector<float> a(n * kDim), b(n * kDim);
    switch (random() % 12) {
      case 0:  // evaluation
        memory.Lookup(keys.data(), n, false, a.data(), Serial());
        tiered.Lookup(keys.data(), n, false, b.data(), Threads{3});
        CHECK(a == b);
        break;
      case 1: {
        CHECK_EQ(memory.Remove(keys.data(), n / 8, Serial()),
                 tiered.Remove(keys.data(), n / 8, Threads{3}));
        break;
      }
      case 2:
        CHECK_EQ(memory.Evict(Serial()), tiered.Evict(Threads{2}));
        break;
      case 3: {
        const uint32_t since = random() % 2 == 0 ? 0 : static_cast<uint32_t>(memory.step() / 2);
        CHECK(Save(&memory, since) == Save(&tiered, since));
        break;
      }
      case 4: {
        std::vector<int64_t> own(keys);
        std::sort(own.begin(), own.end());
        own.erase(std::unique(own.begin(), own.end()), own.end());
        std::vector<float> rows(own.size() * kDim), slots(own.size() * memory.slot_floats());
        for (float& x : rows) x = static_cast<float>(random() % 1000) / 64.0f;
        for (float& x : slots) x = static_cast<float>(random() % 1000) / 64.0f;
        std::vector<int64_t> frequency(own.size()), last(own.size(), memory.step());
        for (int64_t& f : frequency) f = static_cast<int64_t>(random() % 6);
        const gmeta::ConstRecordColumns columns{own.data(), rows.data(), slots.data(),
                                                frequency.data(), last.data()};
        memory.Merge(columns, own.size(), Serial());
        tiered.Merge(columns, own.size(), Threads{2});
        break;
      }
      default: {
        // A step of training, mostly with its rows read ahead.
        const bool ahead = random() % 4 != 0;
        std::vector<int64_t> sa(n), sb(n);
        if (ahead) {
          memory.Peek(keys.data(), n, a.data(), sa.data(), Serial());
          tiered.Peek(keys.data(), n, b.data(), sb.data(), Threads{3});
          CHECK(a == b);
          memory.Reread(keys.data(), n, true, sa.data(), a.data(), Serial());
          tiered.Reread(keys.data(), n, true, sb.data(), b.data(), Threads{3});
        } else {
          memory.Lookup(keys.data(), n, true, a.data(), Serial());
          tiered.Lookup(keys.data(), n, true, b.data(), Threads{3});
        }
        CHECK(a == b);
        std::vector<float> gradients(n * kDim);
        for (float& g : gradients) g = static_cast<float>(random() % 200) / 100.0f - 1.0f;
        memory.Update(keys.data(), gradients.data(), n, 0.05f, Serial());
        tiered.Update(keys.data(), gradients.data(), n, 0.05f, Threads{3});
      }
    }
    CHECK_EQ(memory.size(), tiered.size());
    pushed = pushed || tiered.Statistics().brought > 0;
  }
};

void TestSame(TableOptions options, const std::string& folder, uint64_t seed) {
  options.dim = kDim;
  options.initializer = {gmeta::Initializer::Kind::kUniform, -1.0f, 1.0f, 7};
  options.log2_shards = 2;
  Pair pair(options, folder, seed);
  pair.memory.StartJournal(1 << 20);
  pair.tiered.StartJournal(1 << 20);
  for (int i = 0; i < 120; ++i) pair.Step();
  const int64_t ids[] = {pair.memory.TakeSnapshot(), pair.tiered.TakeSnapshot()};
  const Saved then = Save(&pair.memory, 0);
  CHECK(then == Save(&pair.tiered, 0));
  for (int i = 0; i < 60; ++i) pair.Step();
  CHECK(pair.memory.RestoreSnapshot(ids[0], Serial()));
  CHECK(pair.tiered.RestoreSnapshot(ids[1], Threads{2}));
  CHECK(Save(&pair.memory, 0) == Save(&pair.tiered, 0));
  pair.memory.DropSnapshot(ids[0]);
  pair.tiered.DropSnapshot(ids[1]);
  for (int i = 0; i < 60; ++i) pair.Step();
  CHECK(Save(&pair.memory, 0) == Save(&pair.tiered, 0));
  CHECK(pair.pushed);
  const gmeta::TableStatistics a = pair.memory.Statistics(), b = pair.tiered.Statistics();
  CHECK(a.hits == b.hits && a.misses == b.misses && a.inserts == b.inserts &&
        a.removes == b.removes && a.updates == b.updates && a.ignored == b.ignored &&
        a.rejects == b.rejects && a.evictions == b.evictions && a.half_rows == b.half_rows);
  CHECK(b.disk_rows > b.size / 2 && b.disk_bytes > 0 && b.spilled >= b.brought);
  const int64_t step = pair.memory.step();
  const Saved s = Save(&pair.memory, 0);
  const gmeta::ConstRecordColumns columns{s.keys.data(), s.rows.data(), s.slots.data(),
                                          s.frequency.data(), s.last_step.data()};
  pair.tiered.Replace(columns, s.keys.size(), step, Threads{2});
  Saved again = Save(&pair.tiered, 0);
  CHECK(again.keys == s.keys && again.rows == s.rows && again.slots == s.slots &&
        again.frequency == s.frequency && again.last_step == s.last_step && again.live == s.live);
}

// Batches of several threads at once, with evaluations and peeks between them.
void TestThreads(const std::string& folder) {
  TableOptions options;
  options.dim = kDim;
  options.optimizer = gmeta::Adam{0.9, 0.999, 1e-8};
  options.log2_shards = 2;
  options.disk = gmeta::DiskTier{folder, 4000, 4096};
  Table table(options);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::vector<float> rows(200 * kDim), gradients(200 * kDim, 0.1f);
      std::vector<int64_t> stamps(200);
      for (int i = 0; i < 100; ++i) {
        const std::vector<int64_t> keys = DrawKeys(&random, 200);
        if (t == 3) {
          table.Lookup(keys.data(), 200, false, rows.data(), Serial());
          continue;
        }
        table.Peek(keys.data(), 200, rows.data(), stamps.data(), Serial());
        table.Reread(keys.data(), 200, true, stamps.data(), rows.data(), Serial());
        table.Update(keys.data(), gradients.data(), 200, 0.01f, Serial());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(table.Statistics().brought > 0);
}

// A folder that isn't there ends the call that needs it; the table keeps all of its rows.
void TestAnErrorReachesTheCaller() {
  TableOptions options;
  options.dim = kDim;
  options.disk = gmeta::DiskTier{"/nowhere", 4000};
  options.log2_shards = 1;
  Table table(options);
  std::vector<int64_t> keys(60000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  std::vector<float> rows(keys.size() * kDim);
  std::string told;
  try {
    table.Lookup(keys.data(), keys.size(), true, rows.data(), Threads{2});  // the batch has room
    table.Update(keys.data(), rows.data(), keys.size(), 0.1f, Threads{2});
  } catch (const gmeta::disk::DiskError& error) {
    told = error.what();
  }
  CHECK(told.find("/nowhere/gmeta-rows-") != std::string::npos);
  CHECK_EQ(table.size(), keys.size());
  table.Lookup(keys.data(), keys.size(), false, rows.data(), Threads{2});
}

}  // namespace

int main() {
  // Thousands of small writes: in memory where that is possible. record_log_test.cc uses a drive.
  const std::string folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ".";
  const gmeta::SparseOptimizer optimizers[] = {gmeta::Sgd{}, gmeta::Adam{0.9, 0.999, 1e-8},
                                               gmeta::RowWiseAdagrad{0.1, 1e-8}};
  const std::optional<gmeta::Eviction> evictions[] = {
      std::nullopt,
      gmeta::Eviction{gmeta::EvictByAge{}, 900, 0, 5},
      gmeta::Eviction{gmeta::EvictByFrequency{}, 0, 90000, 7},
      gmeta::Eviction{gmeta::EvictExpired{20}, 0, 0, 3},
      gmeta::Eviction{gmeta::EvictByNorm{0.9}, 1200, 0, 6},
  };
  uint64_t seed = 0;
  for (const auto& optimizer : optimizers) {
    for (const auto& eviction : evictions) {
      for (const uint32_t half_below : {0u, 4u}) {
        TableOptions options;
        options.optimizer = optimizer;
        options.eviction = eviction;
        const bool cools = half_below != 0 && seed % 4 == 1;
        options.half = {half_below, cools ? 5u : 0u};
        options.round_at_random = cools;
        if (seed % 3 == 1) options.admission = gmeta::AdmitByCount{2};
        TestSame(options, folder, ++seed);
      }
    }
  }
  TestThreads(folder);
  TestAnErrorReachesTheCaller();
  std::puts("ok");
}
