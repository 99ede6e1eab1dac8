// Rows that are peeked and then reread are those of a lookup, and so is the table afterwards: drawn
// operations on two tables, one of which reads ahead; batches that break the order of steps; and
// threads.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::Table;

namespace {

constexpr size_t kDim = 3;

gmeta::TableOptions Options() {
  gmeta::TableOptions options;
  options.dim = kDim;
  options.optimizer = gmeta::Adam{0.9f, 0.999f, 1e-7f};
  options.initializer = {gmeta::Initializer::Kind::kUniform, -1.0f, 1.0f, 7};
  return options;
}

using Record = std::tuple<int64_t, int64_t, std::vector<float>>;

std::map<int64_t, Record> Read(Table* table) {
  std::vector<int64_t> keys, frequency, last_step;
  std::vector<float> rows, slots;
  CHECK(table->Export(
      [&](uint64_t n, int64_t) -> std::optional<gmeta::RecordColumns> {
        keys.resize(n);
        frequency.resize(n);
        last_step.resize(n);
        rows.resize(n * kDim);
        slots.resize(n * table->slot_floats());
        return gmeta::RecordColumns{keys.data(), rows.data(), slots.data(), frequency.data(),
                                    last_step.data()};
      },
      Serial()));
  const size_t width = table->slot_floats();
  std::map<int64_t, Record> records;
  for (size_t i = 0; i < keys.size(); ++i) {
    std::vector<float> values(rows.begin() + i * kDim, rows.begin() + (i + 1) * kDim);
    values.insert(values.end(), slots.begin() + i * width, slots.begin() + (i + 1) * width);
    records[keys[i]] = {frequency[i], last_step[i], std::move(values)};
  }
  return records;
}

std::vector<uint64_t> Counts(const Table& table) {
  const gmeta::TableStatistics s = table.Statistics();
  return {s.size,    s.hits,    s.misses,  s.inserts,   s.removes,
          s.updates, s.ignored, s.rejects, s.evictions, s.half_rows};
}

struct Ahead {
  std::vector<int64_t> keys;
  std::vector<float> rows;
  std::vector<int64_t> stamps;
};

// A table that looks up, and one that is peeked at any time and rereads.
class Pair {
 public:
  Pair(const gmeta::TableOptions& options, uint64_t seed)
      : random_(seed), plain_(options), ahead_(options) {}

  void Run(int operations) {
    for (int i = 0; i < operations; ++i) {
      switch (random_() % 10) {
        case 0:
        case 1:
        case 2:
          Peek();
          break;
        case 3:
        case 4:
        case 5:
          Reread();
          break;
        case 6: {
          const auto keys = Keys();
          Both([&](Table& table) { table.Remove(keys.data(), keys.size(), Serial()); });
          break;
        }
        case 7:
          Other();
          break;
        default:
          Update();
      }
      CHECK(Counts(plain_) == Counts(ahead_));
    }
    CHECK(Read(&plain_) == Read(&ahead_));
    CHECK(unchanged_ > 0);
  }

 private:
  template <class Work>
  void Both(const Work& work) {
    work(plain_);
    work(ahead_);
  }

  std::vector<int64_t> Keys() {
    std::vector<int64_t> keys(random_() % 20);
    for (int64_t& key : keys) key = static_cast<int64_t>(random_() % 60);
    return keys;
  }

  void Peek() {
    Ahead one{Keys(), {}, {}};
    one.rows.resize(one.keys.size() * kDim);
    one.stamps.resize(one.keys.size());
    ahead_.Peek(one.keys.data(), one.keys.size(), one.rows.data(), one.stamps.data(), Threads{2});
    peeked_.push_back(std::move(one));
  }

  void Reread() {
    if (peeked_.empty()) return;
    std::swap(peeked_[random_() % peeked_.size()], peeked_.back());
    Ahead one = std::move(peeked_.back());
    peeked_.pop_back();
    const size_t n = one.keys.size();
    const bool insert = random_() % 4 != 0;
    std::vector<float> expected(n * kDim);
    plain_.Lookup(one.keys.data(), n, insert, expected.data(), Serial());
    const uint64_t changed =
        ahead_.Reread(one.keys.data(), n, insert, one.stamps.data(), one.rows.data(), Threads{2});
    CHECK(changed <= n);
    unchanged_ += n - changed;
    CHECK(one.rows == expected);
  }

  void Update() {
    const auto keys = Keys();
    std::vector<float> gradients(keys.size() * kDim);
    for (float& value : gradients) value = static_cast<float>(random_() % 7) - 3.0f;
    Both([&](Table& table) {
      table.Update(keys.data(), gradients.data(), keys.size(), 0.1f, Serial());
    });
  }

  // What happens between two steps.
  void Other() {
    switch (random_() % 5) {
      case 0:
        Both([](Table& table) { table.Evict(Serial()); });
        break;
      case 1:
        snapshots_ = {plain_.TakeSnapshot(), ahead_.TakeSnapshot()};
        break;
      case 2:
        plain_.RestoreSnapshot(snapshots_.first, Serial());
        ahead_.RestoreSnapshot(snapshots_.second, Serial());
        break;
      default: {
        const bool replace = random_() % 2 == 0;
        const int64_t key = static_cast<int64_t>(random_() % 60), frequency = 2;
        const int64_t last_step =
            std::max<int64_t>(plain_.step() + static_cast<int64_t>(random_() % 3) - 1, 0);
        const std::vector<float> row(kDim, 0.5f), slots(plain_.slot_floats(), 0.25f);
        const gmeta::ConstRecordColumns columns{&key, row.data(), slots.data(), &frequency,
                                                &last_step};
        Both([&](Table& table) {
          replace ? table.Replace(columns, 1, 3, Serial()) : table.Merge(columns, 1, Serial());
        });
      }
    }
  }

  std::mt19937_64 random_;
  Table plain_, ahead_;
  std::vector<Ahead> peeked_;
  std::pair<int64_t, int64_t> snapshots_{-1, -1};
  uint64_t unchanged_ = 0;
};

void TestDrawnOperations() {
  const std::vector<gmeta::Admission> admissions = {gmeta::AdmitAll{}, gmeta::AdmitByCount{2},
                                                    gmeta::AdmitByFilter{2, 100, 10.0, 3},
                                                    gmeta::AdmitByChance{0.5, 3}};
  const std::vector<std::optional<gmeta::Eviction>> evictions = {
      std::nullopt, gmeta::Eviction{gmeta::EvictByAge{}, 30, 0, 0},
      gmeta::Eviction{gmeta::EvictByFrequency{}, 0, 3000, 0},
      gmeta::Eviction{gmeta::EvictExpired{5}, 0, 0, 3},
      gmeta::Eviction{gmeta::EvictByNorm{0.9}, 40, 0, 4}};
  uint64_t seed = 0;
  for (const auto& admission : admissions) {
    for (const auto& eviction : evictions) {
      for (const uint32_t half_below : {0, 1, 3}) {
        for (const bool prior : {false, true}) {
          gmeta::TableOptions options = Options();
          options.admission = admission;
          options.eviction = eviction;
          options.half = {half_below, half_below == 3 ? 2u : 0u};
          options.round_at_random = half_below == 3;
          if (prior) options.prior = gmeta::RowPrior({0.1f, 0.0f, 0.2f});
          Pair(options, ++seed).Run(300);
        }
      }
    }
  }
}

void TestATableInAnothersPlaceIsNoticed() {
  Table one(Options());
  gmeta::TableOptions options = Options();
  options.initializer.seed = 8;
  Table other(options);
  const std::vector<int64_t> keys = {1, 2, 3};
  std::vector<float> rows(9), expected(9);
  std::vector<int64_t> stamps(3);
  one.Peek(keys.data(), 3, rows.data(), stamps.data(), Serial());
  CHECK(other.Reread(keys.data(), 3, true, stamps.data(), rows.data(), Serial()) == 3);
  other.Lookup(keys.data(), 3, false, expected.data(), Serial());
  CHECK(rows == expected);
}

void TestAKeyThatARereadInsertsKeepsItsPeekedRow() {
  gmeta::TableOptions options = Options();
  options.half.half_below = 3;
  Table table(options);
  const std::vector<int64_t> keys = {1, 2};
  std::vector<float> rows(6), expected(6);
  std::vector<int64_t> stamps(2);
  table.Peek(keys.data(), 2, rows.data(), stamps.data(), Serial());
  CHECK(table.size() == 0);
  CHECK(table.Statistics().misses == 0);
  CHECK(table.Reread(keys.data(), 2, true, stamps.data(), rows.data(), Serial()) == 0);
  CHECK(table.size() == 2);
  table.Lookup(keys.data(), 2, false, expected.data(), Serial());
  CHECK(rows == expected);
}

// At one step, a row is peeked, evicted, and made again.
void TestARowThatIsMadeAgainIsNoticed() {
  gmeta::TableOptions options = Options();
  options.dim = 1;
  options.optimizer = gmeta::Sgd{};
  options.initializer = {gmeta::Initializer::Kind::kConstant, 1.0f, 0.0f, 0};
  options.eviction = gmeta::Eviction{gmeta::EvictByNorm{0.5}, 0, 0, 0};
  Table table(options);
  const int64_t key = 1;
  const float gradient = 0.75f;
  float row, other;
  int64_t stamp;
  table.Lookup(&key, 1, true, &row, Serial());
  table.Update(&key, &gradient, 1, 1.0f, Serial());
  table.Peek(&key, 1, &row, &stamp, Serial());
  CHECK_EQ(row, 0.25f);
  CHECK_EQ(table.Evict(Serial()), 1u);
  table.Lookup(&key, 1, true, &other, Serial());
  CHECK_EQ(table.Reread(&key, 1, true, &stamp, &row, Serial()), 1u);
  CHECK_EQ(row, 1.0f);
}

void TestAnUpdateOfOtherKeysReadsNothingAgain() {
  Table table(Options());
  const std::vector<int64_t> keys = {1, 2};
  const std::vector<float> gradients(6, 1.0f);
  std::vector<float> rows(6), expected(6);
  std::vector<int64_t> stamps(2);
  const auto update = [&](int64_t key) { table.Update(&key, gradients.data(), 1, 0.1f, Serial()); };
  table.Lookup(keys.data(), 2, true, rows.data(), Serial());
  table.Peek(keys.data(), 2, rows.data(), stamps.data(), Serial());
  update(2);
  update(3);
  CHECK_EQ(table.Reread(keys.data(), 2, true, stamps.data(), rows.data(), Serial()), 1u);
  table.Lookup(keys.data(), 2, false, expected.data(), Serial());
  CHECK(rows == expected);
}

// One shard, at the steps that a table gives batches which run at the same time.
class Disordered {
 public:
  Disordered()
      : recipe_(gmeta::MakeRecipe(Options())),
        arenas_(recipe_.layout),
        shard_(&recipe_, &arenas_, 0, 1) {}

  void Touch(uint32_t step) {
    std::vector<float> rows(kDim);
    shard_.LookupOrInsert(items(), step, gmeta::AllRows(rows.data(), kDim));
  }
  void Update(uint32_t step) {
    const std::vector<float> gradients(kDim, 1.0f);
    shard_.Update(items(), gradients.data(), step,
                  recipe_.prior.With(gmeta::Adam{0.9f, 0.999f, 1e-7f}.Begin(0.1f, step), 0.1f));
  }
  void Peek() { shard_.Peek(items(), gmeta::StampedRows(row_.data(), kDim, &stamp_)); }
  bool IsChanged() {
    return shard_.Lookup(items(), gmeta::ChangedRows(row_.data(), kDim, &stamp_)) != 0;
  }

 private:
  gmeta::BatchItems items() const { return {&item_, 1}; }

  gmeta::BatchItem item_{5, 0};
  gmeta::RowRecipe recipe_;
  gmeta::RowArenas arenas_;
  gmeta::Shard shard_;
  std::vector<float> row_ = std::vector<float>(kDim);
  int64_t stamp_ = 0;
};

void TestStepsThatGoBackAreNoticed() {
  Disordered early;  // a lookup has the step of an update that hasn't come to its row yet
  early.Touch(1);
  early.Peek();
  early.Update(1);
  CHECK(early.IsChanged());

  Disordered late;  // a lookup comes to its row after the updates that followed it
  late.Touch(0);
  late.Update(1);
  late.Peek();
  late.Update(2);
  late.Touch(1);
  CHECK(late.IsChanged());

  Disordered ordered;
  ordered.Touch(0);
  ordered.Update(1);
  ordered.Peek();
  ordered.Touch(1);
  CHECK(!ordered.IsChanged());
}

// Each update adds 1 to a row. So a row that is reread must show at least the updates that had
// ended when the reread began.
void TestThreadsNeverReadARowThatIsTooOld(int log2_shards) {
  gmeta::TableOptions options;
  options.initializer = {gmeta::Initializer::Kind::kConstant, 0.0f, 0.0f, 0};
  options.log2_shards = log2_shards;
  Table table(options);
  const std::vector<int64_t> keys = {1, 2, 3, 4, 5, 6, 7, 8};
  const size_t n = keys.size();
  std::vector<float> start(n);
  table.Lookup(keys.data(), n, true, start.data(), Serial());
  std::vector<std::atomic<int>> done(n);
  std::atomic<bool> stop{false};
  std::atomic<int> updates{0};
  const auto update = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    const float minus_one = -1.0f;
    for (int i = 0; i < 4000; ++i) {
      const size_t at = random() % n;
      table.Update(&keys[at], &minus_one, 1, 1.0f, Serial());
      ++done[at];
      ++updates;
    }
    stop = true;
  };
  const auto read = [&](bool insert) {
    std::vector<float> rows(n);
    std::vector<int64_t> stamps(n);
    std::vector<int> least(n);
    while (!stop) {
      table.Peek(keys.data(), n, rows.data(), stamps.data(), Serial());
      for (const int before = updates; !stop && updates < before + 2;) std::this_thread::yield();
      for (size_t i = 0; i < n; ++i) least[i] = done[i];
      table.Reread(keys.data(), n, insert, stamps.data(), rows.data(), Serial());
      for (size_t i = 0; i < n; ++i) CHECK(rows[i] >= static_cast<float>(least[i]));
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 2; ++seed) threads.emplace_back(update, seed);
  for (const bool insert : {true, true, false}) threads.emplace_back(read, insert);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  TestDrawnOperations();
  TestATableInAnothersPlaceIsNoticed();
  TestAKeyThatARereadInsertsKeepsItsPeekedRow();
  TestARowThatIsMadeAgainIsNoticed();
  TestAnUpdateOfOtherKeysReadsNothingAgain();
  TestStepsThatGoBackAreNoticed();
  for (const int log2_shards : {0, 2}) TestThreadsNeverReadARowThatIsTooOld(log2_shards);
  return 0;
}
