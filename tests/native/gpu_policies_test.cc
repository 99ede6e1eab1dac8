// What a GPU table decides on the host (ops/table/gpu/policies.h) is what the CPU's table decides:
// both run the same random batches, the GPU's side on a map in place of device memory.

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "ops/table/gpu/policies.h"
#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::Admission;
using gmeta::AdmitAll;
using gmeta::AdmitByChance;
using gmeta::AdmitByCount;
using gmeta::AdmitByFilter;
using gmeta::EvictByAge;
using gmeta::EvictByFrequency;
using gmeta::EvictExpired;
using gmeta::Eviction;
using gmeta::GpuTablePolicies;
using gmeta::JudgedGpuRow;
using gmeta::LogicalRange;
using gmeta::MissingKey;
using gmeta::RowHeader;
using gmeta::ShardExportColumns;
using gmeta::ShardExportSizes;
using gmeta::ShardSelection;
using gmeta::Table;

namespace {

constexpr size_t kDim = 6;
constexpr uint64_t kRowBytes = 8 + 4 * kDim + Eviction::kIndexBytes;  // that a full row charges
constexpr LogicalRange kAll{0, gmeta::kLogicalShards};

// Rows by key, handled as GpuTable handles its own.
class Model {
 public:
  Model(const Admission& admission, const std::optional<Eviction>& eviction, uint32_t half_below)
      : half_below_(half_below),
        policies_(admission, eviction, gmeta::RowLayout(kDim, 0).bytes(),
                  gmeta::HalfLayout(gmeta::RowLayout(kDim, 0)).bytes()) {}

  GpuTablePolicies& policies() { return policies_; }
  const std::map<int64_t, RowHeader>& rows() const { return rows_; }
  bool IsHalf(const RowHeader& row) const { return row.frequency < half_below_; }

  void LookupOrInsert(const std::vector<int64_t>& keys, uint32_t step) {
    if (policies_.evict()) {
      uint64_t met = 0;
      for (const int64_t key : keys) met |= uint64_t{1} << policies_.ShardOf(key);
      NoteHalves();
      Evict(policies_.Full(met), step, false);
    }
    std::vector<MissingKey> missing;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (rows_.count(keys[i]) == 0) missing.push_back({static_cast<uint32_t>(i), keys[i]});
    }
    const std::vector<uint8_t> admitted = policies_.Admit(missing, step);
    std::vector<bool> reads(keys.size(), true);
    for (size_t i = 0; i < missing.size(); ++i) reads[missing[i].position] = admitted[i] != 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (reads[i]) rows_[keys[i]].Touch(step, true);
    }
  }

  void Update(const std::vector<int64_t>& keys, uint32_t step) {
    for (const int64_t key : keys) {
      const auto row = rows_.find(key);
      if (row != rows_.end()) row->second.last_step = step;
    }
    if (policies_.evict()) Evict(policies_.SweepDue(step), step, true);
  }

  void Remove(const std::vector<int64_t>& keys) {
    for (const int64_t key : keys) {
      if (rows_.erase(key) != 0) policies_.Removed(key);
    }
  }

 private:
  void Evict(uint64_t shards, uint32_t step, bool sweep) {
    if (shards == 0) return;
    NoteHalves();
    std::vector<JudgedGpuRow> judged;
    for (const auto& [key, header] : rows_) {
      if ((shards >> policies_.ShardOf(key) & 1) == 0) continue;
      judged.push_back({key, header.frequency, header.last_step, 0.0, IsHalf(header)});
    }
    for (const int64_t key : policies_.Victims(judged, step, sweep)) CHECK_EQ(rows_.erase(key), 1u);
  }

  // What the GPU counts.
  void NoteHalves() {
    std::vector<uint32_t> halves(policies_.shards());
    for (const auto& [key, header] : rows_) halves[policies_.ShardOf(key)] += IsHalf(header);
    policies_.NoteHalves(halves.data());
  }

  const uint32_t half_below_;
  GpuTablePolicies policies_;
  std::map<int64_t, RowHeader> rows_;
};

struct Saved {
  std::map<int64_t, RowHeader> rows;
  std::vector<int64_t> removed, waiting, waiting_counts;
  bool whole = false;
};

Saved Save(Table* table) {
  std::vector<int64_t> keys, frequency, last_step, splits(gmeta::kLogicalShards + 1), live(splits);
  std::vector<float> weights;
  Saved saved;
  const auto allocate = [&](const ShardExportSizes& sizes) -> std::optional<ShardExportColumns> {
    for (auto* column : {&keys, &frequency, &last_step}) column->resize(sizes.rows);
    weights.resize(sizes.rows * kDim);
    saved.removed.resize(sizes.removed);
    saved.waiting.resize(sizes.waiting);
    saved.waiting_counts.resize(sizes.waiting);
    saved.whole = sizes.journal_whole;
    return ShardExportColumns{
        {keys.data(), weights.data(), nullptr, frequency.data(), last_step.data()},
        splits.data(),
        saved.removed.data(),
        splits.data(),
        live.data(),
        saved.waiting.data(),
        saved.waiting_counts.data(),
        splits.data()};
  };
  CHECK(table->ExportShards(kAll, 0, allocate, Serial()));
  for (size_t i = 0; i < keys.size(); ++i) {
    saved.rows[keys[i]] = {static_cast<uint32_t>(frequency[i]),
                           static_cast<uint32_t>(last_step[i])};
  }
  return saved;
}

void CheckSame(Table* table, Model* model) {
  const Saved saved = Save(table);
  CHECK_EQ(saved.rows.size(), model->rows().size());
  for (const auto& [key, header] : saved.rows) {
    const auto row = model->rows().find(key);
    CHECK(row != model->rows().end());
    CHECK_EQ(row->second.frequency, header.frequency);
    CHECK_EQ(row->second.last_step, header.last_step);
  }
  const auto is_half = [&](const auto& row) { return model->IsHalf(row.second); };
  CHECK_EQ(table->Statistics().half_rows,
           static_cast<uint64_t>(std::count_if(saved.rows.begin(), saved.rows.end(), is_half)));
  const ShardSelection selection = model->policies().CutRange(kAll);
  CHECK_EQ(selection.removed.size(), saved.removed.size());
  for (size_t i = 0; i < saved.removed.size(); ++i) {
    CHECK_EQ(selection.removed[i].key, saved.removed[i]);
  }
  CHECK_EQ(selection.waiting.size(), saved.waiting.size());
  for (size_t i = 0; i < saved.waiting.size(); ++i) {
    CHECK_EQ(selection.waiting[i].key, saved.waiting[i]);
    CHECK_EQ(int64_t{selection.waiting[i].count}, saved.waiting_counts[i]);
  }
  CHECK_EQ(model->policies().IsWhole(kAll), saved.whole);
}

void TestDecisions(const Admission& admission, const std::optional<Eviction>& eviction,
                   uint32_t half_below) {
  gmeta::TableOptions options;
  options.dim = kDim;
  options.admission = admission;
  options.eviction = eviction;
  options.half_below = half_below;
  Table table(options);
  Model model(admission, eviction, half_below);
  CHECK_EQ(model.policies().shards(), table.filters());
  constexpr size_t kJournal = 20000;
  table.StartJournal(kJournal);
  for (auto& journal : model.policies().journals()) journal.Start(kJournal / table.filters());
  std::mt19937_64 random(7);
  for (int call = 0; call < 120; ++call) {
    std::vector<int64_t> keys(random() % 900 + 1);
    for (int64_t& key : keys) key = static_cast<int64_t>(random() % 9000) - 4500;
    std::vector<float> rows(keys.size() * kDim);
    switch (random() % 8) {
      case 0:
        table.Remove(keys.data(), keys.size() / 8, Serial());
        model.Remove({keys.begin(), keys.begin() + static_cast<ptrdiff_t>(keys.size() / 8)});
        break;
      case 1:
      case 2:
        table.Update(keys.data(), rows.data(), keys.size(), 0.1f, Serial());
        model.Update(keys, static_cast<uint32_t>(table.step()));
        break;
      default:
        table.Lookup(keys.data(), keys.size(), true, rows.data(), Serial());
        model.LookupOrInsert(keys, static_cast<uint32_t>(table.step()));
    }
    if (call % 10 == 0) CheckSame(&table, &model);
  }
  CheckSame(&table, &model);
}

}  // namespace

int main() {
  for (const uint32_t half_below : {0u, 2u, 4u}) {
    TestDecisions(AdmitByCount{2}, std::nullopt, half_below);
    TestDecisions(AdmitByFilter{3, 5000, 9.6, 7}, std::nullopt, half_below);
    TestDecisions(AdmitByChance{0.2, 5}, std::nullopt, half_below);
    TestDecisions(AdmitAll{}, Eviction{EvictByAge{}, 900, 0, 0}, half_below);
    TestDecisions(AdmitAll{}, Eviction{EvictByFrequency{}, 0, 4200 * kRowBytes, 0}, half_below);
    TestDecisions(AdmitAll{}, Eviction{EvictByAge{}, 0, 3100 * kRowBytes, 0}, half_below);
    TestDecisions(AdmitAll{}, Eviction{EvictExpired{4}, 6000, 0, 3}, half_below);
    TestDecisions(AdmitByCount{2}, Eviction{EvictByAge{}, 2600, 0, 0}, half_below);
  }
}
