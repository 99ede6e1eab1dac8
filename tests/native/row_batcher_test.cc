// The row batcher against a queue that is written out: every order, batch size and kind of column.

#include "io/rows/row_batcher.h"

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "tests/native/check.h"

using namespace gmeta::rows;  // NOLINT: the test is of all of it

namespace {

struct Columns {
  std::vector<int64_t> row, group, list, splits;
};

struct Row {
  int64_t row, group;
  std::vector<int64_t> list;
  bool operator==(const Row& other) const {
    return row == other.row && group == other.group && list == other.list;
  }
};

int64_t next_value = 0;

// Rows of so many in each group, no two values alike.
Block<Columns> RandomBlock(std::mt19937* rng, bool shuffle, std::vector<Row>* expected) {
  Columns columns;
  std::vector<int64_t> ends;
  std::vector<Row> rows;
  columns.splits.push_back(0);
  const size_t groups = (*rng)() % 4;
  for (size_t group = 0; group < groups; ++group) {
    columns.group.push_back(next_value++);
    for (size_t left = (*rng)() % 5; left > 0; --left) {
      Row row{next_value++, columns.group.back(), {}};
      for (size_t values = (*rng)() % 4; values > 0; --values) row.list.push_back(next_value++);
      columns.row.push_back(row.row);
      columns.list.insert(columns.list.end(), row.list.begin(), row.list.end());
      columns.splits.push_back(static_cast<int64_t>(columns.list.size()));
      rows.push_back(row);
    }
    ends.push_back(static_cast<int64_t>(rows.size()));
  }
  const Shuffle draws{shuffle, {3, 4}, (*rng)()};
  if (shuffle) Permute(Draws(draws.seed, draws.stream), &rows);
  expected->insert(expected->end(), rows.begin(), rows.end());
  return MakeBlock(std::move(columns), ends.data(), groups, draws);
}

std::vector<Row> Take(RowBatcher<Columns>* batcher, size_t count) {
  std::vector<int64_t> row(count), group(count), ends(count);
  int64_t *to_row = row.data(), *to_group = group.data(), *to_end = ends.data(), total = 0;
  batcher->Next(count, [&](const Block<Columns>& block, const uint32_t* rows, size_t own) {
    to_row = GatherRows(block.owner.row.data(), rows, own, to_row);
    to_group = GatherGroups(block.owner.group.data(), block.group.data(), rows, own, to_group);
    total = GatherEnds(block.owner.splits.data(), rows, own, total, to_end);
    to_end += own;
  });
  std::vector<int64_t> list(static_cast<size_t>(total));
  int64_t* to_list = list.data();
  batcher->Next(count, [&](const Block<Columns>& block, const uint32_t* rows, size_t own) {
    to_list = GatherLists(block.owner.list.data(), block.owner.splits.data(), rows, own, to_list);
  });
  CHECK(to_row == row.data() + count && to_list == list.data() + total);
  std::vector<Row> taken;
  for (size_t i = 0; i < count; ++i) {
    taken.push_back(
        {row[i], group[i], {list.begin() + (i == 0 ? 0 : ends[i - 1]), list.begin() + ends[i]}});
  }
  batcher->Drop(count);
  return taken;
}

void BatchesAreTheQueues() {
  std::mt19937 rng(1);
  for (int round = 0; round < 300; ++round) {
    RowBatcher<Columns> batcher;
    std::vector<Row> expected, taken;
    const size_t size = 1 + rng() % 7;
    for (int blocks = 0; blocks < 6; ++blocks) {
      batcher.Push(RandomBlock(&rng, round % 2 == 0, &expected));
      while (batcher.waiting() >= size) {
        const std::vector<Row> batch = Take(&batcher, size);
        taken.insert(taken.end(), batch.begin(), batch.end());
      }
    }
    const std::vector<Row> rest = Take(&batcher, batcher.waiting());
    taken.insert(taken.end(), rest.begin(), rest.end());
    CHECK(taken == expected);
    CHECK(batcher.blocks().empty());
  }
}

// A queue that is saved between two batches goes on as it would have.
void AQueueGoesOnFromWhatItKeeps() {
  std::mt19937 rng(2);
  for (int round = 0; round < 100; ++round) {
    RowBatcher<Columns> batcher, restored;
    std::vector<Row> expected;
    while (batcher.waiting() < 8) batcher.Push(RandomBlock(&rng, true, &expected));
    Take(&batcher, 1 + rng() % 7);
    for (const auto& block : batcher.blocks()) restored.Push(block);
    CHECK(restored.waiting() == batcher.waiting());
    CHECK(Take(&restored, restored.waiting()) == Take(&batcher, batcher.waiting()));
  }
}

void OrdersDifferByStream() {
  const int64_t end = 20;
  std::set<std::vector<uint32_t>> orders;
  for (uint64_t stream = 0; stream < 50; ++stream) {
    orders.insert(MakeBlock(0, &end, 1, {true, {1, 2}, stream}).order);
  }
  CHECK(orders.size() == 50);
}

}  // namespace

int main() {
  BatchesAreTheQueues();
  AQueueGoesOnFromWhatItKeeps();
  OrdersDifferByStream();
  return 0;
}
