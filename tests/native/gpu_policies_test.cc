// Which keys a GPU table admits, as the host decides it (ops/table/gpu/policies.h), is what the
// CPU's table decides, and so are the journals: both run the same random batches, the GPU's side on
// a map in place of device memory. Eviction, which needs a GPU, is in emulated_table_test.cc.

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
using gmeta::AdmitByChance;
using gmeta::AdmitByCount;
using gmeta::AdmitByFilter;
using gmeta::GpuTablePolicies;
using gmeta::LogicalRange;
using gmeta::MissingKey;
using gmeta::RowHeader;
using gmeta::ShardExportColumns;
using gmeta::ShardExportSizes;
using gmeta::ShardSelection;
using gmeta::Table;

namespace {

constexpr size_t kDim = 6;
constexpr LogicalRange kAll{0, gmeta::kLogicalShards};

// Rows by key, handled as GpuTable handles its own.
class Model {
 public:
  explicit Model(const Admission& admission)
      : policies_(admission, std::nullopt, gmeta::RowLayout(kDim, 0).bytes(),
                  gmeta::HalfLayout(gmeta::RowLayout(kDim, 0)).bytes()) {}

  GpuTablePolicies& policies() { return policies_; }
  const std::map<int64_t, RowHeader>& rows() const { return rows_; }

  void LookupOrInsert(const std::vector<int64_t>& keys, uint32_t step) {
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
  }

  void Remove(const std::vector<int64_t>& keys) {
    for (const int64_t key : keys) {
      if (rows_.erase(key) != 0) policies_.Removed(key);
    }
  }

 private:
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

void TestDecisions(const Admission& admission) {
  gmeta::TableOptions options;
  options.dim = kDim;
  options.admission = admission;
  Table table(options);
  Model model(admission);
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
  TestDecisions(AdmitByCount{2});
  TestDecisions(AdmitByFilter{3, 5000, 9.6, 7});
  TestDecisions(AdmitByChance{0.2, 5});
}
