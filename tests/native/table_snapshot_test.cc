// A table goes back to its snapshots: drawn operations, several snapshots at once, each held to a
// copy of all records that was made when it was taken.

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

using gmeta::Table;

namespace {

constexpr size_t kDim = 3;
constexpr int64_t kKeys = 60;

// Key -> frequency, last step, weights and slots; and the table's step.
struct Content {
  std::map<int64_t, std::tuple<int64_t, int64_t, std::vector<float>>> records;
  int64_t step = 0;
  bool operator==(const Content& other) const {
    return step == other.step && records == other.records;
  }
};

Content Read(Table* table) {
  std::vector<int64_t> keys, frequency, last_step;
  std::vector<float> rows, slots;
  Content content;
  CHECK(table->Export(
      [&](uint64_t n, int64_t step) -> std::optional<gmeta::RecordColumns> {
        keys.resize(n);
        frequency.resize(n);
        last_step.resize(n);
        rows.resize(n * table->dim());
        slots.resize(n * table->slot_floats());
        content.step = step;
        return gmeta::RecordColumns{keys.data(), rows.data(), slots.data(), frequency.data(),
                                    last_step.data()};
      },
      Serial()));
  const size_t width = table->slot_floats();
  for (size_t i = 0; i < keys.size(); ++i) {
    std::vector<float> values(rows.begin() + i * kDim, rows.begin() + (i + 1) * kDim);
    values.insert(values.end(), slots.begin() + i * width, slots.begin() + (i + 1) * width);
    content.records[keys[i]] = {frequency[i], last_step[i], std::move(values)};
  }
  return content;
}

struct Taken {
  int64_t id;
  Content content;
  uint64_t half_rows;
};

class Drawn {
 public:
  Drawn(uint64_t seed, const gmeta::HalfRule& half)
      : random_(seed), half_(half), table_(Options()) {}

  void Run(int operations) {
    for (int i = 0; i < operations; ++i) {
      switch (random_() % 8) {
        case 0:
          taken_.push_back({table_.TakeSnapshot(), Read(&table_), table_.Statistics().half_rows});
          break;
        case 1:
          Restore();
          break;
        case 2:
          Drop();
          break;
        case 3: {
          const auto keys = Keys();
          table_.Remove(keys.data(), keys.size(), Serial());
          break;
        }
        case 4:
        case 5: {
          const auto keys = Keys();
          std::vector<float> rows(keys.size() * kDim);
          table_.Lookup(keys.data(), keys.size(), true, rows.data(), Serial());
          break;
        }
        default:
          Update();
      }
    }
    while (!taken_.empty()) {
      Restore();
      Drop();
    }
    CHECK(!table_.RestoreSnapshot(0, Serial()));  // it was dropped
  }

 private:
  gmeta::TableOptions Options() const {
    gmeta::TableOptions options;
    options.dim = kDim;
    options.optimizer = gmeta::Adam{0.9f, 0.999f, 1e-7f};
    options.initializer = {gmeta::Initializer::Kind::kUniform, -1.0f, 1.0f, 7};
    options.half = half_;
    options.round_at_random = true;
    options.log2_shards = 1;
    return options;
  }

  std::vector<int64_t> Keys() {
    std::vector<int64_t> keys(random_() % 20);
    for (int64_t& key : keys) key = static_cast<int64_t>(random_() % kKeys);
    return keys;
  }

  void Update() {
    const auto keys = Keys();
    std::vector<float> gradients(keys.size() * kDim);
    for (float& value : gradients) value = static_cast<float>(random_() % 7) - 3.0f;
    table_.Update(keys.data(), gradients.data(), keys.size(), 0.1f, Serial());
  }

  void Restore() {
    if (taken_.empty()) return;
    const Taken& chosen = taken_[random_() % taken_.size()];
    CHECK(table_.RestoreSnapshot(chosen.id, Serial()));
    CHECK(Read(&table_) == chosen.content);
    CHECK_EQ(table_.Statistics().half_rows, chosen.half_rows);
  }

  void Drop() {
    if (taken_.empty()) return;
    const size_t place = random_() % taken_.size();
    table_.DropSnapshot(taken_[place].id);
    CHECK(!table_.RestoreSnapshot(taken_[place].id, Serial()));
    taken_.erase(taken_.begin() + static_cast<ptrdiff_t>(place));
  }

  std::mt19937_64 random_;
  const gmeta::HalfRule half_;
  Table table_;
  std::vector<Taken> taken_;
};

}  // namespace

int main() {
  const gmeta::HalfRule rules[] = {{0}, {4}, {4, 3}, {2, 20}};
  for (uint64_t seed = 0; seed < 20; ++seed) Drawn(seed, rules[seed % 4]).Run(400);
  return 0;
}
