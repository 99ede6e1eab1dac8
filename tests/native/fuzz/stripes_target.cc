// A stripe of events, a column by itself, which no checksum covers, and the index of a shard.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/shard_index.h"
#include "io/history/stripe.h"
#include "tests/native/check.h"
#include "tests/native/fuzz/target.h"

namespace gmeta::fuzz {
namespace {

using history::StripeFault;
using Values = std::vector<int64_t>;

// For each form of a column events that it is the smallest for.
std::vector<Values> Samples() {
  std::vector<Values> columns(5);
  for (int64_t i = 0; i < 60; ++i) {
    columns[0].push_back(7);
    columns[1].push_back(i * i * 37 % 101);
    columns[2].push_back(1'700'000'000 + 30 * i + (i > 40 ? 86400 : 0));
    columns[3].push_back((i * i % 7) << 33);
    columns[4].push_back(i % 3 == 1 ? (i * i * i * 7919) << 20 : 0);
  }
  return columns;
}

class StripesTarget : public Target {
 public:
  std::string name() const override { return "stripes"; }

  std::vector<Input> Seeds() const override {
    const std::vector<Values> samples = Samples();
    std::vector<const int64_t*> columns;
    for (const Values& each : samples) columns.push_back(each.data());
    std::string stripe;
    history::AppendStripe(columns.data(), columns.size(), samples[0].size(), &stripe);
    return {{stripe}};
  }

  void Run(const Input& input) override {
    history::Stripe stripe;
    if (stripe.Open(input[0]) != StripeFault::kNone) return;
    CHECK(stripe.size() <= input[0].size());
    CHECK(stripe.events() <= history::kMaxEvents);
    Values values(stripe.events());
    for (size_t i = 0; i < stripe.columns(); ++i) stripe.Read(i, values.data());
  }
};

// A byte, the number of values, and the column.
class ColumnsTarget : public Target {
 public:
  std::string name() const override { return "columns"; }
  size_t growth() const override { return 4096; }

  std::vector<Input> Seeds() const override {
    std::vector<Input> seeds;
    for (const Values& each : Samples()) {
      std::string column(1, static_cast<char>(each.size()));
      history::AppendColumn(each.data(), each.size(), &column);
      seeds.push_back({column});
    }
    return seeds;
  }

  void Run(const Input& input) override {
    if (input[0].empty()) return;
    const auto count = static_cast<uint8_t>(input[0][0]);
    const std::vector<char> exact(input[0].begin() + 1, input[0].end());
    Values values(count), again(count);
    if (!history::ReadColumn({exact.data(), exact.size()}, count, values.data())) return;
    std::string column;
    history::AppendColumn(values.data(), count, &column);
    CHECK(history::ReadColumn(column, count, again.data()));
    CHECK(values == again);
  }
};

// The index of a shard.
class IndexTarget : public Target {
 public:
  std::string name() const override { return "history_index"; }

  std::vector<Input> Seeds() const override {
    history::ShardIndex index;
    const history::StripePlace place{0, 2, 400, 100, 50, -3, 12, 0, 2};
    for (int64_t user = -2; user < 6; user += 3) index.Add(user, &place, 1, user == 1 ? 7 : 0);
    index.Add(6, nullptr, 0, 3);
    return {{index.Encode()}, {history::ShardIndex().Encode()}};
  }

  void Run(const Input& input) override {
    history::ShardIndex index, again;
    if (index.Decode(input[0]) != history::IndexFault::kNone) return;
    CHECK(again.Decode(index.Encode()) == history::IndexFault::kNone);
    CHECK_EQ(again.users(), index.users());
    CHECK_EQ(again.stripes(), index.stripes());
  }
};

}  // namespace

std::vector<std::unique_ptr<Target>> StripeTargets() {
  std::vector<std::unique_ptr<Target>> targets;
  targets.push_back(std::make_unique<StripesTarget>());
  targets.push_back(std::make_unique<ColumnsTarget>());
  targets.push_back(std::make_unique<IndexTarget>());
  return targets;
}

}  // namespace gmeta::fuzz
