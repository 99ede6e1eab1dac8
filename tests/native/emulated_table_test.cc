// The GPU's table on an emulated GPU (emulated_gpu/emulation.h) is the CPU's: the same calls to
// both, and rows, records, statistics and saved content are the same to the last bit, under any
// order of threads; with rows of one precision and of two, with and without policies.

#include "tests/native/emulated_table.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

namespace {

using namespace emulated_table;

// Rows that a GPU table has read ahead.
struct Ahead {
  vector<int64_t> keys, stamps;
  vector<float> rows;
  bool distinct;

  int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

int64_t unchanged_rows = 0;  // that rereads of all traces haven't read again

// Random calls to both tables. The GPU's also reads ahead.
void TestTrace(const Settings& settings, int calls, int64_t key_range, size_t most_keys,
               uint32_t seed) {
  emulated::settings.seed = seed;
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  std::mt19937_64 random(seed);
  const size_t dim = settings.dim;
  vector<float> numbers(most_keys * dim + 4);
  float* const aligned =
      numbers.data() + (16 - reinterpret_cast<uintptr_t>(numbers.data()) % 16) % 16 / sizeof(float);
  vector<Ahead> peeked;
  for (int call = 0; call < calls; ++call) {
    vector<int64_t> keys(random() % most_keys + 1);
    for (int64_t& key : keys) {
      key = static_cast<int64_t>(random() % static_cast<uint64_t>(key_range)) - key_range / 2;
      if (random() % 3 == 0) key /= 8;
    }
    const bool distinct = random() % 2 == 0;
    if (distinct) {
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      std::shuffle(keys.begin(), keys.end(), random);
    }
    const size_t n = keys.size();
    const auto count = static_cast<int64_t>(n);
    // Where rows aren't aligned to vectors, they are copied number by number.
    float* const rows = random() % 4 == 0 && n < most_keys ? aligned + 1 : aligned;
    vector<float> expected(n * dim);
    const uint64_t kind = random() % 10;
    if (kind < 6 && random() % 2 == 0 && !peeked.empty()) {
      std::swap(peeked[random() % peeked.size()], peeked.back());
      Ahead one = std::move(peeked.back());
      peeked.pop_back();
      vector<float> other(one.rows.size());
      float* const to = random() % 2 == 0 ? one.rows.data() : other.data();
      int64_t changed = -1;
      CHECK_EQ(
          gmeta_gpu_table_reread(gpu.table, one.keys.data(), one.size(), kind != 0, one.distinct,
                                 one.rows.data(), one.stamps.data(), to, &changed, nullptr),
          0);
      expected.resize(one.rows.size());
      table.Lookup(one.keys.data(), one.keys.size(), kind != 0, expected.data(), Serial());
      CHECK(SameBits(to, expected.data(), expected.size()));
      CHECK(0 <= changed && changed <= one.size());
      unchanged_rows += one.size() - changed;
    } else if (kind < 6) {
      const bool insert = kind != 0;
      CHECK_EQ(insert ? gmeta_gpu_table_lookup_or_insert(gpu.table, keys.data(), count, distinct,
                                                         rows, nullptr)
                      : gmeta_gpu_table_lookup(gpu.table, keys.data(), count, rows, nullptr),
               0);
      table.Lookup(keys.data(), n, insert, expected.data(), Serial());
      CHECK(SameBits(rows, expected.data(), n * dim));
    } else if (kind < 8) {
      std::normal_distribution<float> normal;
      for (float& x : expected) x = normal(random) * (random() % 2 == 0 ? 1.0f : 1e-5f);
      std::copy(expected.begin(), expected.end(), rows);
      vector<int64_t> key_of(keys);
      if (distinct && random() % 2 == 0) {  // gradients of positions, which leave some keys out
        vector<int32_t> positions(n);
        for (size_t i = 0; i < n; ++i) {
          positions[i] = static_cast<int32_t>(random() % n);
          key_of[i] = keys[static_cast<size_t>(positions[i])];
        }
        CHECK_EQ(gmeta_gpu_table_update_indexed(gpu.table, keys.data(), count, rows,
                                                positions.data(), count, 0.1f, nullptr),
                 0);
      } else {
        CHECK_EQ(
            gmeta_gpu_table_update(gpu.table, keys.data(), rows, count, 0.1f, distinct, nullptr),
            0);
      }
      table.Update(key_of.data(), expected.data(), n, 0.1f, Serial());
    } else if (kind == 8) {
      int64_t removed = 0;
      CHECK_EQ(gmeta_gpu_table_remove(gpu.table, keys.data(), count / 3, &removed, nullptr), 0);
      CHECK_EQ(static_cast<uint64_t>(removed), table.Remove(keys.data(), n / 3, Serial()));
      const int64_t at = random() % 2 == 0 ? -1 : std::max<int64_t>(0, table.step() - 3);
      const uint64_t turns = random() % 2 == 0 ? ~uint64_t{0} : random();
      CHECK_EQ(gmeta_gpu_table_evict(gpu.table, at, turns, &removed, nullptr), 0);
      CHECK_EQ(static_cast<uint64_t>(removed), table.Evict(Serial(), at, turns));
    } else {
      // What is there comes again with other frequencies, so that rows change their form, and with
      // other numbers, some of them at steps to come.
      Records records = Export(&table);
      const bool replace = random() % 2 == 0;
      const int64_t step = replace ? 5 : table.step();
      for (int64_t& frequency : records.frequency) frequency = static_cast<int64_t>(random() % 9);
      for (int64_t& last : records.last_step) last = step + static_cast<int64_t>(random() % 2);
      for (float& number : records.rows) number += 0.25f;
      const size_t taken = replace ? records.keys.size() : records.keys.size() / 2;
      CHECK_EQ(
          gmeta_gpu_table_import(gpu.table, records.keys.data(), records.rows.data(),
                                 records.slots.data(), records.frequency.data(),
                                 records.last_step.data(), static_cast<int64_t>(taken), 5, replace),
          0);
      const gmeta::ConstRecordColumns columns{records.keys.data(), records.rows.data(),
                                              records.slots.data(), records.frequency.data(),
                                              records.last_step.data()};
      replace ? table.Replace(columns, taken, 5, Serial()) : table.Merge(columns, taken, Serial());
    }
    // Of this batch, of one that comes later, or of some other.
    if (settings.hbm_rows != 0 && random() % 3 != 0) {
      CHECK_EQ(gmeta_gpu_table_prefetch(gpu.table, keys.data(), count, nullptr), 0);
    }
    if (random() % 2 == 0) {
      Ahead one{keys, vector<int64_t>(n), vector<float>(n * dim), distinct};
      CHECK_EQ(gmeta_gpu_table_peek(gpu.table, keys.data(), count, one.rows.data(),
                                    one.stamps.data(), nullptr),
               0);
      peeked.push_back(std::move(one));
    }
    if (call % 6 == 5) CheckSame(gpu, &table);
  }
  CheckSame(gpu, &table);
}

// Many rows of equal rank in several shards that evict at different times, and journals.
void TestShardsEvictAlike(const char* policy, const vector<double>& parameters, uint32_t half_below,
                          uint32_t seed) {
  Settings settings{4, "sgd", {}, {half_below}};
  settings.eviction = policy;
  settings.eviction_parameters = parameters;
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  CHECK(table.filters() > 1);
  constexpr size_t kJournal = 100000, kMostKeys = 2000;
  CHECK_EQ(gmeta_gpu_table_start_journal(gpu.table, kJournal), 0);
  table.StartJournal(kJournal);
  std::mt19937_64 random(seed);
  vector<float> rows(kMostKeys * settings.dim), expected(rows);
  for (int call = 0; call < 12; ++call) {
    vector<int64_t> keys(random() % kMostKeys + 1);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % 9000) - 4500;
    const auto count = static_cast<int64_t>(keys.size());
    if (call % 4 == 3) {
      std::fill(rows.begin(), rows.end(), 1.0f);
      CHECK_EQ(gmeta_gpu_table_update(gpu.table, keys.data(), rows.data(), count, .1f, 0, nullptr),
               0);
      table.Update(keys.data(), rows.data(), keys.size(), .1f, Serial());
    } else {
      CHECK_EQ(
          gmeta_gpu_table_lookup_or_insert(gpu.table, keys.data(), count, 0, rows.data(), nullptr),
          0);
      table.Lookup(keys.data(), keys.size(), true, expected.data(), Serial());
      CHECK(SameBits(rows.data(), expected.data(), keys.size() * settings.dim));
    }
  }
  CheckSame(gpu, &table);
  CHECK(table.Statistics().evictions > 0);
  vector<int64_t> removed, splits(gmeta::kLogicalShards + 1), live(splits);
  const auto allocate = [&](const gmeta::ShardExportSizes& sizes) {
    removed.resize(sizes.removed);
    gmeta::ShardExportColumns columns{};
    columns.removed = removed.data();
    columns.row_splits = columns.removed_splits = columns.waiting_splits = splits.data();
    columns.live = live.data();
    return std::optional(columns);
  };
  CHECK(table.ExportShards({0, gmeta::kLogicalShards}, UINT32_MAX, allocate, Serial()));
  CHECK(gpu.Export(true).removed == removed);
  int64_t statistics[18];
  CHECK_EQ(gmeta_gpu_table_statistics(gpu.table, statistics), 0);
  CHECK(statistics[1] >= 2 * GMETA_PART_SLOTS);  // the capacity: the index was cut
}

// At one step, a row is peeked, evicted, and made again.
void TestARowThatIsMadeAgainIsReadAgain() {
  Settings settings{4, "sgd", {}, {0}};
  settings.eviction = "norm";
  settings.eviction_parameters = {0, 0, 0, 100};  // of any row
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  const int64_t key = 3;
  const vector<float> gradient(4, 1.0f);
  vector<float> peeked(4), rows(4), expected(4);
  int64_t stamp = 0, count = 0;
  CHECK_EQ(gmeta_gpu_table_lookup_or_insert(gpu.table, &key, 1, 1, rows.data(), nullptr), 0);
  CHECK_EQ(gmeta_gpu_table_update(gpu.table, &key, gradient.data(), 1, 0.1f, 1, nullptr), 0);
  CHECK_EQ(gmeta_gpu_table_peek(gpu.table, &key, 1, peeked.data(), &stamp, nullptr), 0);
  CHECK_EQ(gmeta_gpu_table_evict(gpu.table, -1, ~uint64_t{0}, &count, nullptr), 0);
  CHECK_EQ(count, 1);
  CHECK_EQ(gmeta_gpu_table_lookup_or_insert(gpu.table, &key, 1, 1, rows.data(), nullptr), 0);
  CHECK_EQ(gmeta_gpu_table_reread(gpu.table, &key, 1, 1, 1, peeked.data(), &stamp, rows.data(),
                                  &count, nullptr),
           0);
  CHECK_EQ(count, 1);
  table.Lookup(&key, 1, false, expected.data(), Serial());  // the initial row
  CHECK(SameBits(rows.data(), expected.data(), 4));
}

// Memory for promoted rows may be missing: the lookup says so, and the next one goes on.
void TestPromotionGoesOnWhenThereIsMemory() {
  const Settings settings{64, "adagrad", {0.1, 1e-7}, {2}};
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  vector<int64_t> keys(600);
  std::iota(keys.begin(), keys.end(), 0);
  vector<float> rows(keys.size() * settings.dim), expected(rows);
  const auto look_up = [&](size_t first, size_t n) {
    return gmeta_gpu_table_lookup_or_insert(gpu.table, keys.data() + first, static_cast<int64_t>(n),
                                            1, rows.data(), nullptr);
  };
  const auto expect = [&](size_t first, size_t n) {
    table.Lookup(keys.data() + first, n, true, expected.data(), Serial());
    CHECK(SameBits(rows.data(), expected.data(), n * settings.dim));
  };
  CHECK_EQ(look_up(0, 600), 0);
  expect(0, 600);
  emulated::device_memory.most = emulated::device_memory.bytes + 100000;
  CHECK_EQ(look_up(0, 600), GMETA_CUDA_OUT_OF_MEMORY);
  expect(0, 600);  // but for that, all was done
  int64_t removed = 0;
  CHECK_EQ(gmeta_gpu_table_remove(gpu.table, keys.data(), 50, &removed, nullptr), 0);
  CHECK_EQ(table.Remove(keys.data(), 50, Serial()), static_cast<uint64_t>(removed));
  CHECK_EQ(look_up(100, 10), GMETA_CUDA_OUT_OF_MEMORY);  // which does nothing before
  emulated::device_memory.most = SIZE_MAX;
  CHECK_EQ(look_up(0, 300), 0);
  expect(0, 300);
  CheckSame(gpu, &table);
}

// Host memory for growth is allocated ahead, by a thread.
void TestHostMemoryIsThereBeforeGrowth() {
  auto& pinned = emulated::pinned_memory;
  gmeta::SpareChunk spare;
  const auto take = [&](size_t bytes) { return spare.Take(bytes).bytes(); };
  CHECK_EQ(take(1), size_t{0});
  spare.Ask(1000);
  spare.Ask(5000);  // there is a chunk already
  CHECK_EQ(take(600), size_t{1000});
  CHECK_EQ(take(600), size_t{0});
  spare.Ask(1000);
  CHECK_EQ(take(2000), size_t{0});
  CHECK_EQ(take(600), size_t{0});
  pinned.most = pinned.bytes + 500;
  spare.Ask(1000);
  CHECK_EQ(take(1), size_t{0});
  pinned.most = SIZE_MAX;

  Settings settings{64, "adagrad", {0.1, 1e-7}};
  settings.hbm_rows = 256;
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  pinned.threads.clear();
  vector<int64_t> keys(100);
  vector<float> rows(keys.size() * settings.dim), expected(rows);
  for (int64_t batch = 0; batch < 200; ++batch) {
    std::iota(keys.begin(), keys.end(), 100 * batch);
    CHECK_EQ(gmeta_gpu_table_lookup_or_insert(gpu.table, keys.data(), 100, 1, rows.data(), nullptr),
             0);
    table.Lookup(keys.data(), keys.size(), true, expected.data(), Serial());
    CHECK(SameBits(rows.data(), expected.data(), rows.size()));
  }
  CHECK(pinned.threads.size() > 1);
  CheckSame(gpu, &table);
}

// Training with a small cache: each batch is prefetched some batches before its step. Rows beyond
// `host_bytes` are on disk (0: none are).
void TestStepsWithTiers(size_t dim, int64_t lookahead, gmeta::HalfRule half, int64_t host_bytes,
                        uint32_t seed) {
  constexpr int kSteps = 40;
  constexpr size_t kKeys = 48;
  Settings settings{dim, "adam", {0.9, 0.999, 1e-7}, half};
  settings.hbm_rows = 256;
  settings.lookahead = lookahead;
  settings.host_bytes = host_bytes;
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  std::mt19937_64 random(seed);
  vector<vector<int64_t>> batches;
  for (int i = 0; i < kSteps + 4; ++i) {
    vector<int64_t>& keys = batches.emplace_back(kKeys);
    for (int64_t& key : keys)
      key = static_cast<int64_t>(1200 / (1 + random() % 1200) + random() % 900);
  }
  vector<int64_t> all(1400);
  std::iota(all.begin(), all.end(), 0);
  vector<float> rows(all.size() * settings.dim), expected(rows);
  const auto look_up = [&](const vector<int64_t>& keys) {
    CHECK_EQ(
        gmeta_gpu_table_lookup_or_insert(gpu.table, keys.data(), static_cast<int64_t>(keys.size()),
                                         0, rows.data(), nullptr),
        0);
    table.Lookup(keys.data(), keys.size(), true, expected.data(), Serial());
    CHECK(SameBits(rows.data(), expected.data(), keys.size() * settings.dim));
  };
  for (auto first = all.begin(); first != all.end(); first += 20) look_up({first, first + 20});
  for (int64_t i = 0; i < kSteps; ++i) {
    const vector<int64_t>&keys = batches[i], &later = batches[i + lookahead];
    CHECK_EQ(gmeta_gpu_table_prefetch(gpu.table, later.data(), kKeys, nullptr), 0);
    look_up(keys);
    for (size_t j = 0; j < kKeys * settings.dim; ++j) rows[j] = 0.01f * static_cast<float>(j % 7);
    CHECK_EQ(gmeta_gpu_table_update(gpu.table, keys.data(), rows.data(), kKeys, 0.1f, 0, nullptr),
             0);
    table.Update(keys.data(), rows.data(), kKeys, 0.1f, Serial());
  }
  CheckSame(gpu, &table);
  int64_t found[18];
  CHECK_EQ(gmeta_gpu_table_statistics(gpu.table, found), 0);
  const int64_t brought = found[14], spilled = found[15], host_rows = found[16];
  const int64_t disk_rows = found[12], disk_bytes = found[13];
  CHECK(brought > 0 && spilled > 0);
  CHECK(host_rows + disk_rows >= 1400 - 2 * 256 && host_rows + disk_rows < 1400);
  if (host_bytes == 0) {
    CHECK(brought < kSteps * static_cast<int64_t>(kKeys));  // some were there
    CHECK_EQ(disk_rows, 0);
  } else {
    CHECK(disk_rows > 100);
    CHECK(dim < 64 || disk_bytes > 0);  // else all of them are in a segment that isn't full
  }
}

// A disk that can't be written to: the call says so, and the table stays as it was.
void TestADiskThatIsAbsent() {
  Settings settings{64, "adam", {0.9, 0.999, 1e-7}, {0}};
  settings.hbm_rows = 64;
  settings.host_bytes = 1 << 14;
  settings.disk_folder = "no/such/folder";
  Gpu gpu(settings);
  Table table(OptionsOf(settings));
  vector<int64_t> keys(100);
  vector<float> rows(keys.size() * settings.dim), expected(rows);
  int status = 0;
  for (int64_t first = 0; status == 0; first += 100) {
    CHECK(first < 2000);
    std::iota(keys.begin(), keys.end(), first);
    status = gmeta_gpu_table_lookup_or_insert(gpu.table, keys.data(), 100, 1, rows.data(), nullptr);
    if (status == 0) table.Lookup(keys.data(), 100, true, expected.data(), Serial());
  }
  CHECK_EQ(status, GMETA_CUDA_OUT_OF_MEMORY);
  CHECK(std::string(gmeta_cuda_error()).find("no/such/folder") != std::string::npos);
  CheckSame(gpu, &table);
}

}  // namespace

int main() {
  uint32_t seed = 1;
  for (const gmeta::HalfRule half : {gmeta::HalfRule{0}, {2}, {5}, {3, 2}}) {
    TestTrace({64, "adam", {0.9, 0.999, 1e-7}, half}, 18, 500, 300, seed++);
    TestTrace({67, "adagrad", {0.1, 1e-7}, half, 1}, 12, 500, 300, seed++);
    TestTrace({128, "rowwise_adagrad", {0.1, 1e-7}, half}, 12, 300, 200, seed++);
    const double row = 8 + 4 * 128 + 48;
    Settings bound{64, "momentum", {0.9, 1.0}, half};
    bound.eviction = "frequency";
    bound.eviction_parameters = {0, 300 * row, 0};
    TestTrace(bound, 18, 3000, 300, seed++);
    bound.admission = "count";
    bound.admission_parameters = {2};
    bound.eviction = "norm";
    bound.eviction_parameters = {0, 0, 2, 7.9};
    TestTrace(bound, 18, 900, 300, seed++);
  }
  for (const int64_t lookahead : {0, 1, 2, 4}) {
    TestStepsWithTiers(8, lookahead, {0}, 0, seed++);
    TestStepsWithTiers(8, lookahead, {6}, 0, seed++);
    TestStepsWithTiers(8, lookahead, {3, 9}, 30000, seed++);
    // Any calls in any order, also such as change rows on their way.
    for (const gmeta::HalfRule half : {gmeta::HalfRule{0}, {3}, {3, 2}}) {
      Settings tiers{8, "adam", {0.9, 0.999, 1e-7}, half};
      tiers.hbm_rows = 64;
      tiers.lookahead = lookahead;
      TestTrace(tiers, 40, 500, 100, seed++);
      Settings policies = tiers;
      policies.eviction = "frequency";
      policies.eviction_parameters = {300, 0, 0};
      policies.admission = "count";
      policies.admission_parameters = {2};
      TestTrace(policies, 40, 900, 100, seed++);
      tiers.host_bytes = 1 << 14;
      TestTrace(tiers, 20, 900, 100, seed++);
      tiers.eviction = "norm";
      tiers.eviction_parameters = {500, 0, 2, 1.0};
      TestTrace(tiers, 20, 900, 100, seed++);
    }
  }
  TestStepsWithTiers(64, 1, {0}, 150000, seed++);
  TestADiskThatIsAbsent();
  // Few keys, which come often: rows that are peeked change in every way before they are reread.
  for (const gmeta::HalfRule half : {gmeta::HalfRule{0}, {3}, {3, 2}, {2, 9}}) {
    Settings few{4, "sgd", {}, half};
    TestTrace(few, 100, 30, 12, seed++);
    few.eviction = "norm";
    few.eviction_parameters = {0, 0, 0, 1.5};
    TestTrace(few, 100, 30, 12, seed++);
  }
  CHECK(unchanged_rows > 0);
  seed = 61;  // with which each of them evicts
  for (const uint32_t half_below : {0u, 2u}) {
    const double row = 8 + 4 * 4 + 48;
    TestShardsEvictAlike("age", {2100, 0, 0}, half_below, seed++);
    TestShardsEvictAlike("frequency", {0, 4200 * row, 0}, half_below, seed++);
    TestShardsEvictAlike("expired", {4100, 0, 1, 1}, half_below, seed++);
    TestShardsEvictAlike("norm", {2100, 0, 2, 1.0}, half_below, seed++);
  }
  TestARowThatIsMadeAgainIsReadAgain();
  TestPromotionGoesOnWhenThereIsMemory();
  TestHostMemoryIsThereBeforeGrowth();
  CHECK_EQ(emulated::device_memory.bytes, size_t{0});
  CHECK_EQ(emulated::pinned_memory.bytes, size_t{0});
}
