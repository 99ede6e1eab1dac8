// Two shards with their indices: loaded and parsed window by window, group by group, and by the
// threads of an ElementReader; all three must agree.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/group_batch/element_reader.h"
#include "tests/native/check.h"
#include "tests/native/fuzz/coverage.h"
#include "tests/native/fuzz/tables.h"
#include "tests/native/fuzz/target.h"
#include "tests/native/memory_source.h"

namespace gmeta::fuzz {
namespace {

using group_batch::BlockParser;
using group_batch::ElementReader;
using group_batch::EpochOrder;
using group_batch::GroupBlock;
using group_batch::LoadedGroup;
using group_batch::Problem;
using group_batch::WindowLoader;

constexpr int64_t kMostGroups = 64;  // of a shard
constexpr size_t kEntry = sizeof(group_batch::IndexEntry);

// A plan that counts on as many groups as an index has room for, and names its checksum.
group_batch::RangeOptions Plan(const Input& input, Layout layout) {
  group_batch::RangeOptions options;
  const Wanted wanted = Written();
  options.block.columns = wanted.columns;
  options.block.task = wanted.task;
  options.block.batch = wanted.batch;
  options.block.min_rows = 2;
  options.block.layout = layout;
  for (size_t i = 0; i + 1 < input.size(); i += 2) {
    const std::string& index = input[i + 1];
    const int64_t room = index.size() < 36 ? 1 : static_cast<int64_t>((index.size() - 36) / kEntry);
    uint32_t crc = 0;
    if (index.size() >= 4) std::memcpy(&crc, index.data() + index.size() - 4, sizeof(crc));
    options.shards.push_back({std::to_string(i), std::min(room, kMostGroups), crc});
    options.block.paths.push_back(options.shards.back().path);
  }
  options.open = [&input](const std::string& path, std::string*) {
    const bool index = path.size() > 5;  // ends in .gidx
    return std::make_unique<records::MemorySource>(input[std::stoul(path) + (index ? 1 : 0)]);
  };
  options.threads = 2;
  options.groups_a_block = 3;
  return options;
}

// A group as rows: keys, and every column's values.
std::vector<ColumnBuffer> Rows(const std::vector<ColumnSpec>& columns, const GroupBlock& block,
                               size_t entry) {
  const auto begin = static_cast<size_t>(block.row_begin(entry));
  const auto end = static_cast<size_t>(block.entries[entry].row_end);
  std::vector<ColumnBuffer> rows(columns.size());
  for (size_t i = 0; i < columns.size(); ++i) {
    const ColumnBuffer& all = block.columns[i];
    int64_t first = static_cast<int64_t>(begin), last = static_cast<int64_t>(end);
    if (columns[i].is_list) {
      first = begin == 0 ? 0 : all.ends[begin - 1];
      last = end == 0 ? 0 : all.ends[end - 1];
      for (size_t row = begin; row < end; ++row) rows[i].ends.push_back(all.ends[row] - first);
    }
    if (columns[i].dtype == DType::kInt64) {
      rows[i].ints.assign(all.ints.begin() + first, all.ints.begin() + last);
    } else {
      rows[i].floats.assign(all.floats.begin() + first, all.floats.begin() + last);
    }
  }
  return rows;
}

class RangesTarget : public Target {
 public:
  explicit RangesTarget(Layout layout) : layout_(layout) {}

  std::string name() const override {
    return layout_ == Layout::kExample ? "example-ranges" : "columnar-ranges";
  }
  bool indexed() const override { return true; }
  size_t growth() const override { return layout_ == Layout::kColumnar ? kCompressed : kPlain; }

  std::vector<Input> Seeds() const override {
    const std::string first = SampleFile(layout_, false), second = SampleFile(layout_, true);
    const std::string index = SampleIndex(layout_, false);
    return {{first, index, second, SampleIndex(layout_, true)}, {first, index, first, index}};
  }

  void Run(const Input& input) override {
    const group_batch::RangeOptions options = Plan(input, layout_);
    int64_t groups = 0;
    for (const auto& shard : options.shards) groups += shard.groups;
    if (groups == 0) return;
    const EpochOrder order(groups, groups, {3, 1});
    const std::vector<int64_t> numbers = order.Groups(0);

    WindowLoader loader(options.shards, layout_, options.open);
    Memory::ResetPeak();
    const auto window = loader.Load(numbers);
    // The shards' bytes at most once, and a kilobyte for what is known or said of each group.
    CHECK(Memory::peak() <= Size(input) + (static_cast<size_t>(groups) << 10) + (1 << 16));
    const GroupBlock block = Parsed(options, window->groups);
    CheckBlock(options, window->groups, block);

    // Each group by itself, as they lie on the disk, is what it is among the others.
    std::vector<size_t> places(numbers.size());
    for (size_t i = 0; i < places.size(); ++i) places[static_cast<size_t>(numbers[i])] = i;
    WindowLoader one_by_one(options.shards, layout_, options.open);
    for (int64_t number = 0; number < groups; ++number) {
      const GroupBlock alone = Parsed(options, one_by_one.Load({number})->groups);
      const size_t place = places[static_cast<size_t>(number)];
      CHECK_EQ(alone.entries[0].sound, block.entries[place].sound);
      CHECK(records::Same(Rows(options.block.columns, alone, 0),
                          Rows(options.block.columns, block, place)));
    }
    if (std::hash<std::string_view>()(input[0]) % 16 == 0) ReadByThreads(options, order, block);
  }

 private:
  static GroupBlock Parsed(const group_batch::RangeOptions& options,
                           const std::vector<LoadedGroup>& groups) {
    BlockParser parser(options.block);
    GroupBlock block;
    block.columns.resize(options.block.columns.size());
    for (const LoadedGroup& loaded : groups) {
      // In a block of its own size, so that the sanitizer sees a step beyond its end.
      const std::vector<char> exact(loaded.data, loaded.data + (loaded.data ? loaded.size : 0));
      LoadedGroup group = loaded;
      if (loaded.data != nullptr) group.data = exact.data();
      parser.Parse(group, &block);
    }
    return block;
  }

  void CheckBlock(const group_batch::RangeOptions& options, const std::vector<LoadedGroup>& groups,
                  const GroupBlock& block) const {
    CHECK_EQ(block.entries.size(), groups.size());
    CheckInStep(options.block.columns, block.columns, block.entries.back().row_end);
    std::set<size_t> reported;  // shards that can't be read
    size_t told = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
      const GroupBlock::Entry& entry = block.entries[i];
      const int64_t begin = block.row_begin(i), rows = entry.row_end - begin;
      CHECK_EQ(entry.sound, rows > 0);
      int64_t skipped = 0;
      bool problem = false;
      for (; told < block.problems.size() && block.problems[told].entry == i; ++told) {
        CheckMessage(block.problems[told].problem);
        skipped += block.problems[told].problem.skipped;
        problem = true;
      }
      if (groups[i].data == nullptr && problem) reported.insert(groups[i].shard);
      CHECK(entry.sound || problem || reported.count(groups[i].shard) == 1);
      if (groups[i].data == nullptr) continue;
      // Of the rows that the index counts, each is there or was left out, once.
      const int64_t expected = groups[i].entry.rows;
      const size_t ratio = layout_ == Layout::kExample ? 1 : records::columnar::kMaxRatio;
      CHECK(rows <= expected && static_cast<size_t>(expected) / ratio <= groups[i].size);
      CHECK_EQ(rows + skipped, expected);
      CHECK(!entry.sound || rows >= options.block.min_rows);
      CHECK(layout_ == Layout::kExample || !entry.sound || rows == expected);
      CheckKey(Written(), block.columns, begin, entry.row_end, groups[i].entry.key);
    }
    CHECK_EQ(told, block.problems.size());
  }

  // What threads hand out is that, whichever of them was first.
  void ReadByThreads(const group_batch::RangeOptions& options, const EpochOrder& order,
                     const GroupBlock& block) const {
    const auto groups = static_cast<int64_t>(block.entries.size());
    group_batch::ElementOptions element;
    element.groups = 3;
    ElementReader reader(options, element, order, {{{0, groups}}}, {0}, nullptr);
    Problem problem;
    size_t place = 0, problems = 0;
    while (true) {
      const ElementReader::Result result = reader.Next(&problem);
      if (result == ElementReader::Result::kEnd) break;
      if (result == ElementReader::Result::kProblem) {
        CHECK(++problems <= block.problems.size());
        CHECK_EQ(problem.message, block.problems[problems - 1].problem.message);
        continue;
      }
      for (const group_batch::Slice& slice : reader.slices()) {
        for (size_t i = slice.begin; i < slice.end; ++i, ++place) {
          CHECK(place < block.entries.size());
          CHECK(records::Same(Rows(options.block.columns, *slice.block, i),
                              Rows(options.block.columns, block, place)));
        }
      }
      const std::vector<int64_t> cursors = reader.cursors();
      CHECK_EQ(cursors[0], static_cast<int64_t>(place));
      reader.Release();
    }
    CHECK_EQ(place, block.entries.size());
    CHECK_EQ(problems, block.problems.size());
  }

  const Layout layout_;
};

}  // namespace

std::vector<std::unique_ptr<Target>> RangeTargets() {
  std::vector<std::unique_ptr<Target>> targets;
  targets.push_back(std::make_unique<RangesTarget>(Layout::kExample));
  targets.push_back(std::make_unique<RangesTarget>(Layout::kColumnar));
  return targets;
}

}  // namespace gmeta::fuzz
