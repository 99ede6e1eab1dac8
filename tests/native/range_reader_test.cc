// Ranges of an epoch over shards in memory: orders, spans, lanes, threads, and damage to every
// byte.

#include "io/group_batch/range_reader.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/group_batch/element_reader.h"
#include "io/records/columnar_encoder.h"
#include "io/records/example_encoder.h"
#include "tests/native/check.h"
#include "tests/native/memory_source.h"

namespace gmeta::group_batch {
namespace {

using records::DType;

const std::vector<ColumnSpec> kColumns = {{"task", DType::kInt64, false},
                                          {"batch_id", DType::kInt64, false},
                                          {"item", DType::kInt64, false},
                                          {"genre", DType::kInt64, true},
                                          {"rating", DType::kFloat32, false}};

// Group g of task 100 + g has g % 4 + 1 rows; row r of it the item 10 g + r, r genres of that
// number and half of it as its rating.
int64_t Rows(int64_t group) { return group % 4 + 1; }

struct Data {
  std::map<std::string, std::string> files;
  std::vector<ShardSpec> shards;
  Layout layout;
  std::string fails;  // the file that can't be read

  OpenFile Open() const {
    return [this](const std::string& path, std::string* error) {
      const auto found = files.find(path);
      if (found != files.end()) {
        auto source = std::make_unique<records::MemorySource>(found->second);
        if (path == fails) source->FailAt(0);
        return source;
      }
      *error = "no such file";
      return std::unique_ptr<records::MemorySource>();
    };
  }
};

// A shard of groups `first` to `end` - 1 and its index.
void AddShard(const std::string& name, int64_t first, int64_t end, Data* data) {
  std::vector<int64_t> task, batch, item, genre, splits = {0}, ends;
  std::vector<float> rating;
  for (int64_t group = first; group < end; ++group) {
    for (int64_t row = 0; row < Rows(group); ++row) {
      task.push_back(100 + group);
      batch.push_back(group % 3);
      item.push_back(10 * group + row);
      genre.insert(genre.end(), static_cast<size_t>(row), item.back());
      splits.push_back(static_cast<int64_t>(genre.size()));
      rating.push_back(static_cast<float>(item.back()) / 2);
    }
    ends.push_back(static_cast<int64_t>(task.size()));
  }
  const records::ColumnView views[] = {{task.data(), nullptr},
                                       {batch.data(), nullptr},
                                       {item.data(), nullptr},
                                       {genre.data(), splits.data()},
                                       {rating.data(), nullptr}};
  std::unique_ptr<records::RecordEncoder> encoder;
  if (data->layout == Layout::kColumnar) {
    encoder = std::make_unique<records::ColumnarEncoder>(kColumns, 0, 1);
  } else {
    encoder = std::make_unique<records::ExampleEncoder>(kColumns);
  }
  std::vector<int64_t> bytes(ends.size());
  std::vector<uint32_t> crcs(ends.size());
  if (!ends.empty()) {
    encoder->Encode(views, 0,
                    {ends.data(), static_cast<int64_t>(ends.size()), bytes.data(), crcs.data()},
                    1 << 20);
  }
  const std::string shard(encoder->data(), encoder->size());
  std::string index("GIDX");
  const auto add = [&](auto value) {
    index.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  add(uint32_t{1});
  add(static_cast<uint32_t>(data->layout));
  add(uint32_t{0});
  add(static_cast<uint64_t>(end - first));
  add(static_cast<uint64_t>(shard.size()));
  int64_t offset = 0, row = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const int64_t group = first + static_cast<int64_t>(i);
    add(IndexEntry{offset, row, Rows(group), {100 + group, group % 3}, crcs[i], 0});
    offset += bytes[i];
    row += Rows(group);
  }
  add(uint32_t{0xfeed});
  data->files[name] = shard;
  data->files[name + ".gidx"] = index;
  data->shards.push_back({name, end - first, 0xfeed});
}

Data ThreeShards(Layout layout, int64_t groups = 23) {
  Data data;
  data.layout = layout;
  AddShard("a", 0, groups / 3, &data);
  AddShard("b", groups / 3, groups / 2, &data);
  AddShard("c", groups / 2, groups, &data);
  return data;
}

RangeOptions Options(const Data& data, size_t threads = 2, int64_t groups_a_block = 4) {
  RangeOptions options;
  options.block.columns = kColumns;
  options.block.layout = data.layout;
  for (const ShardSpec& shard : data.shards) options.block.paths.push_back(shard.path);
  options.shards = data.shards;
  options.open = data.Open();
  options.threads = threads;
  options.slots = 3;
  options.groups_a_block = groups_a_block;
  return options;
}

// The groups (tasks less 100) of a slice, whose rows must be those that they were written with, or,
// if a group needn't be whole, some of them.
void CheckRows(const Slice& slice, bool whole, std::vector<int64_t>* groups) {
  const GroupBlock& block = *slice.block;
  for (size_t i = slice.begin; i < slice.end; ++i) {
    const GroupBlock::Entry& entry = block.entries[i];
    const int64_t begin = block.row_begin(i), group = entry.key.task - 100;
    CHECK_EQ(entry.sound, entry.row_end > begin);
    if (!entry.sound) continue;
    CHECK(!whole || entry.row_end - begin == Rows(group));
    int64_t next = 0;
    for (int64_t row = begin; row < entry.row_end; ++row) {
      const auto at = static_cast<size_t>(row);
      const int64_t item = block.columns[2].ints[at], number = item - 10 * group;
      CHECK(next <= number && number < Rows(group));
      next = number + 1;
      CHECK_EQ(block.columns[0].ints[at], entry.key.task);
      CHECK_EQ(block.columns[1].ints[at], group % 3);
      CHECK_EQ(block.columns[4].floats[at], static_cast<float>(item) / 2);
      const int64_t from = at == 0 ? 0 : block.columns[3].ends[at - 1];
      CHECK_EQ(block.columns[3].ends[at] - from, number);
      for (int64_t k = from; k < block.columns[3].ends[at]; ++k) {
        CHECK_EQ(block.columns[3].ints[static_cast<size_t>(k)], item);
      }
    }
    groups->push_back(group);
  }
}

struct Read {
  std::vector<std::vector<int64_t>> elements;
  std::vector<Problem> problems;
  std::vector<std::vector<int64_t>> cursors;
};

Read ReadAll(const RangeOptions& range, const EpochOrder& order,
             const std::vector<std::vector<Span>>& lanes, ElementOptions options = {},
             std::vector<int64_t> cursors = {}, ReaderStats* stats = nullptr, bool whole = true) {
  cursors.resize(lanes.size());
  ElementReader reader(range, options, order, lanes, cursors, stats);
  Read read;
  Problem problem;
  while (true) {
    const ElementReader::Result result = reader.Next(&problem);
    if (result == ElementReader::Result::kEnd) return read;
    if (result == ElementReader::Result::kProblem) {
      read.problems.push_back(problem);
      continue;
    }
    read.elements.emplace_back();
    for (const Slice& slice : reader.slices()) CheckRows(slice, whole, &read.elements.back());
    read.cursors.push_back(reader.cursors());
    reader.Release();
  }
}

std::vector<int64_t> Flat(const Read& read) {
  std::vector<int64_t> groups;
  for (const auto& element : read.elements) {
    groups.insert(groups.end(), element.begin(), element.end());
  }
  return groups;
}

std::vector<int64_t> Positions(const EpochOrder& order) {
  std::vector<int64_t> groups;
  for (int64_t window = 0; window < order.windows(); ++window) {
    CHECK_EQ(order.Start(window), static_cast<int64_t>(groups.size()));
    for (const int64_t group : order.Groups(window)) {
      CHECK_EQ(order.WindowOf(static_cast<int64_t>(groups.size())), window);
      groups.push_back(group);
    }
  }
  return groups;
}

void TestAnOrderHasEveryGroupOnce() {
  for (const int64_t groups : {1, 2, 63, 64, 65, 127, 1000, 1001}) {
    for (const int64_t window : {0, 1, 2, 64, 65, 130, 640, 5000}) {
      const EpochOrder order(groups, window, {7, 3});
      const std::vector<int64_t> all = Positions(order);
      CHECK_EQ(static_cast<int64_t>(all.size()), groups);
      CHECK_EQ(order.Start(order.windows()), groups);
      CHECK_EQ(std::set<int64_t>(all.begin(), all.end()).size(), all.size());
      CHECK(window > 0 || std::is_sorted(all.begin(), all.end()));
    }
  }
}

void TestSpansAreReadInTheOrderOfTheEpoch() {
  for (const Layout layout : {Layout::kColumnar, Layout::kExample}) {
    const Data data = ThreeShards(layout);
    for (const int64_t window : {0, 3, 23}) {
      const EpochOrder order(23, window, {1, 2});
      const std::vector<int64_t> all = Positions(order);
      for (const size_t threads : {1, 3}) {
        const RangeOptions range = Options(data, threads);
        ElementOptions options;
        options.groups = 5;
        const std::vector<std::vector<Span>> lanes = {{{2, 9}, {9, 9}, {20, 23}}, {{9, 20}}};
        const Read read = ReadAll(range, order, lanes, options);
        std::vector<int64_t> expected[2];
        for (const int64_t i : {2, 3, 4, 5, 6, 7, 8, 20, 21, 22}) expected[0].push_back(all[i]);
        for (int64_t i = 9; i < 20; ++i) expected[1].push_back(all[i]);
        CHECK_EQ(read.elements.size(), size_t{3});
        for (size_t k = 0; k < read.elements.size(); ++k) {
          std::vector<int64_t> element;
          for (const auto& lane : expected) {
            for (size_t i = 5 * k; i < std::min(5 * k + 5, lane.size()); ++i) {
              element.push_back(lane[i]);
            }
          }
          CHECK(read.elements[k] == element);
          // What is restored from the cursors of an element is what follows it.
          const Read rest = ReadAll(range, order, lanes, options, read.cursors[k]);
          CHECK_EQ(rest.elements.size(), read.elements.size() - k - 1);
          for (size_t i = 0; i < rest.elements.size(); ++i) {
            CHECK(rest.elements[i] == read.elements[k + 1 + i]);
          }
        }
      }
    }
  }
}

// Any byte of a shard or an index may be wrong, and any tail be missing: what is handed out is
// right all the same, every group has its place, and the damage is told.
void TestDamageCostsOnlyWhatItHits() {
  for (const Layout layout : {Layout::kColumnar, Layout::kExample}) {
    const Data sound = ThreeShards(layout, 9);
    const EpochOrder order(9, 9, {4, 4});
    ElementOptions options;
    options.groups = 2;
    options.on_bad = OnBad::kSkip;
    for (const auto& [name, bytes] : sound.files) {
      const bool is_index = name.size() > 1;
      for (size_t at = 0; at < bytes.size(); ++at) {
        for (const int bit : {0, 3, 7, -1}) {  // -1: cut there
          Data data = sound;
          std::string& file = data.files[name];
          if (bit < 0) {
            file.resize(at);
          } else {
            file[at] = static_cast<char>(file[at] ^ 1 << bit);
          }
          ReaderStats stats;
          const RangeOptions range = Options(data, 1);
          const bool whole = layout == Layout::kColumnar;
          const Read read = ReadAll(range, order, {{{0, 9}}}, options, {}, &stats, whole);
          CHECK_EQ(read.elements.size(), size_t{5});
          CHECK(read.problems.empty());
          ReaderCounts counts;
          std::vector<std::string> messages;
          stats.Read(&counts, &messages);
          // In the examples' index the checksum of a group and its first row aren't read, and in a
          // record's protobuf nothing is: its checksum is.
          const size_t in_entry = at < 32 ? 0 : (at - 32) % 48;
          const bool unread = is_index && at >= 32 && at + 4 < bytes.size() && bit >= 0 &&
                              ((in_entry >= 8 && in_entry < 16) || in_entry >= 44 ||
                               (in_entry >= 40 && layout == Layout::kExample));
          CHECK_EQ(messages.empty(), unread);
          for (const std::string& message : messages) {
            CHECK_EQ(message.compare(0, name.substr(0, 1).size(), name.substr(0, 1)), 0);
          }
        }
      }
    }
  }
}

void TestProblemsAreToldOnceAndPassed() {
  Data data = ThreeShards(Layout::kColumnar);
  data.files["b"][20] ^= 1;  // of its first group's payload
  data.files.erase("c.gidx");
  const EpochOrder order(23, 0, {0, 0});
  ElementOptions options;
  options.groups = 3;
  const RangeOptions range = Options(data);
  const Read raised = ReadAll(range, order, {{{0, 23}}}, options);
  CHECK_EQ(raised.problems.size(), size_t{2});
  CHECK(raised.problems[0].fault == Fault::kDataCrc);
  CHECK_EQ(raised.problems[0].skipped, Rows(7));
  CHECK(raised.problems[1].message == "c.gidx: can't be opened: no such file; check the path");
  const std::vector<int64_t> left = {0, 1, 2, 3, 4, 5, 6, 8, 9, 10};
  CHECK(Flat(raised) == left);
  CHECK_EQ(raised.elements.size(), size_t{8});
  options.on_bad = OnBad::kSkip;
  const Read skipped = ReadAll(range, order, {{{0, 23}}}, options);
  CHECK_EQ(skipped.problems.size(), size_t{1});  // a file that isn't there is no bad data
  CHECK(skipped.elements == raised.elements);
}

void TestAFileThatCantBeReadIsNeverSkipped() {
  for (const std::string fails : {"b", "b.gidx"}) {
    Data data = ThreeShards(Layout::kExample);
    data.fails = fails;
    ElementOptions options;
    options.on_bad = OnBad::kSkip;
    const Read read = ReadAll(Options(data), EpochOrder(23, 0, {0, 0}), {{{0, 23}}}, options);
    CHECK(!read.problems.empty());
    for (const Problem& problem : read.problems) {
      CHECK(problem.fault == Fault::kRead);
      CHECK_EQ(problem.message.substr(0, fails.size()), fails);
      CHECK(problem.message.find("can't be read: the cable is out; ") != std::string::npos);
    }
    std::vector<int64_t> left;
    for (int64_t group = 0; group < 23; ++group) {
      if (group < 23 / 3 || group >= 23 / 2) left.push_back(group);
    }
    CHECK(Flat(read) == left);
  }
}

void TestDrawsAreUniform() {
  // Chi square over the six orders of three items; 5 degrees of freedom: one in a thousand is
  // above.
  constexpr int kTimes = 6000;
  std::map<std::vector<int>, int> seen;
  for (int i = 0; i < kTimes; ++i) {
    std::vector<int> items = {0, 1, 2};
    Permute(Draws({11, i}, 0), &items);
    ++seen[items];
  }
  CHECK_EQ(seen.size(), size_t{6});
  double chi = 0;
  for (const auto& [items, count] : seen) {
    const double miss = count - kTimes / 6.0;
    chi += miss * miss / (kTimes / 6.0);
  }
  CHECK(chi < 20.5);
}

void TestBatchesOfEqualCost() {
  const Data data = ThreeShards(Layout::kColumnar);
  const EpochOrder order(23, 0, {0, 0});
  ElementOptions options;
  options.balance = balance::BatchCost{1, 0, 5, 0};
  const RangeOptions range = Options(data);
  const Read read = ReadAll(range, order, {{{0, 23}}}, options);
  // Rows 1 2 3 4 | 1 2 3 4 | ...: the prefixes closest to 5, the longer of two that are equally
  // close.
  CHECK(read.elements[0] == (std::vector<int64_t>{0, 1, 2}));
  CHECK(read.elements[1] == (std::vector<int64_t>{3, 4}));
  CHECK(read.elements[2] == (std::vector<int64_t>{5, 6}));
  CHECK_EQ(Flat(read).size(), size_t{23});
  for (size_t k = 0; k < read.elements.size(); ++k) {
    const Read rest = ReadAll(range, order, {{{0, 23}}}, options, read.cursors[k]);
    CHECK_EQ(rest.elements.size(), read.elements.size() - k - 1);
    for (size_t i = 0; i < rest.elements.size(); ++i) {
      CHECK(rest.elements[i] == read.elements[k + 1 + i]);
    }
  }
}

void TestWorkersKeepTheOrderAndTheBound() {
  std::atomic<int64_t> made{0}, taken{0};
  OrderedWorkers<int64_t> workers(4, 6, [&](int64_t number, size_t) -> std::optional<int64_t> {
    if (number == 1000) return std::nullopt;
    CHECK(made.fetch_add(1) - taken.load() <= 6);
    if (number % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return number;
  });
  for (int64_t expected = 0; expected < 1000; ++expected) {
    const std::optional<int64_t> item = workers.Next();
    CHECK(item.has_value());
    CHECK_EQ(*item, expected);
    ++taken;
  }
  CHECK(!workers.Next().has_value());
  CHECK(!workers.Next().has_value());
}

void TestCancellingWakesWhoWaits() {
  OrderedWorkers<int>* waited = nullptr;
  std::atomic<bool> in_make{false}, let_go{false};
  OrderedWorkers<int> workers(1, 1, [&](int64_t, size_t) -> std::optional<int> {
    in_make = true;
    while (!let_go) std::this_thread::yield();
    return 1;
  });
  waited = &workers;
  std::thread consumer([&] { CHECK(!waited->Next().has_value()); });
  while (!in_make) std::this_thread::yield();
  workers.Cancel();
  consumer.join();
  let_go = true;
}

// Readers are dropped in every stage of reading, from another thread than reads.
void TestReadersCanBeDroppedAtAnyTime() {
  const Data data = ThreeShards(Layout::kExample, 200);
  const EpochOrder order(200, 70, {5, 0});
  const RangeOptions range = Options(data, 3, 2);
  for (int taken = 0; taken < 12; ++taken) {
    RangeReader reader(range, order, {{0, 200}}, 0);
    for (int i = 0; i < taken; ++i) reader.Recycle(reader.Next());
    std::thread canceller([&] { reader.Cancel(); });
    while (reader.Next() != nullptr) {
    }
    canceller.join();
  }
}

}  // namespace
}  // namespace gmeta::group_batch

int main() {
  gmeta::group_batch::TestAnOrderHasEveryGroupOnce();
  gmeta::group_batch::TestSpansAreReadInTheOrderOfTheEpoch();
  gmeta::group_batch::TestDamageCostsOnlyWhatItHits();
  gmeta::group_batch::TestProblemsAreToldOnceAndPassed();
  gmeta::group_batch::TestAFileThatCantBeReadIsNeverSkipped();
  gmeta::group_batch::TestDrawsAreUniform();
  gmeta::group_batch::TestBatchesOfEqualCost();
  gmeta::group_batch::TestWorkersKeepTheOrderAndTheBound();
  gmeta::group_batch::TestCancellingWakesWhoWaits();
  gmeta::group_batch::TestReadersCanBeDroppedAtAnyTime();
  return 0;
}
