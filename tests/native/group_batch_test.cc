// Grouping and shuffling, over files in memory.

#include "io/group_batch/group_batch.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "io/group_batch/group_shuffle.h"
#include "io/group_batch/reader_stats.h"
#include "io/records/example_encoder.h"
#include "tests/native/check.h"
#include "tests/native/memory_source.h"

namespace gmeta::group_batch {
namespace {

using records::DType;
using Result = GroupReader::Result;

const std::vector<ColumnSpec> kColumns = {{"task", DType::kInt64, false},
                                          {"batch_id", DType::kInt64, false},
                                          {"item", DType::kInt64, false},
                                          {"genre", DType::kInt64, true},
                                          {"rating", DType::kFloat32, false}};

// A record whose item numbers it, with `item % 3` genres and item / 2 as its rating.
std::string Record(int64_t task, int64_t batch, int64_t item) {
  const std::vector<int64_t> genre(static_cast<size_t>(item % 3), item * 10);
  const int64_t splits[] = {0, item % 3};
  const float rating = static_cast<float>(item) / 2;
  const records::ColumnView views[] = {{&task, nullptr},
                                       {&batch, nullptr},
                                       {&item, nullptr},
                                       {genre.data(), splits},
                                       {&rating, nullptr}};
  records::ExampleEncoder encoder(kColumns);
  const int64_t end = 1;
  encoder.Encode(views, 0, {&end, 1}, 1 << 20);
  return std::string(encoder.data(), encoder.size());
}

using Files = std::map<std::string, std::string>;

OpenFile Opener(const Files& files) {
  return [&files](const std::string& path, std::string* error) {
    const auto found = files.find(path);
    if (found != files.end()) return std::make_unique<records::MemorySource>(found->second);
    *error = "no such file";
    return std::unique_ptr<records::MemorySource>();
  };
}

std::vector<std::string> Names(const Files& files) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files) names.push_back(name);
  return names;
}

GroupOptions Options(OnBad on_bad = OnBad::kRaise, int64_t min_rows = 1) {
  GroupOptions options;
  options.columns = kColumns;
  options.min_rows = min_rows;
  options.on_bad = on_bad;
  return options;
}

struct Read {
  std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>>> groups;  // task, batch, items
  std::vector<Problem> problems;
};

template <typename Reader>
Read ReadAll(Reader* source, GroupReader* reader) {
  Read read;
  std::unique_ptr<Group> group;
  Problem problem;
  for (Result result; (result = source->Next(&group, &problem)) != Result::kEnd;) {
    if (result == Result::kProblem) {
      read.problems.push_back(problem);
      continue;
    }
    // Whatever the group went through, its columns belong to its items.
    std::vector<int64_t> genre, ends;
    std::vector<float> rating;
    const std::vector<int64_t>& items = group->columns[2].ints;
    for (const int64_t item : items) {
      genre.insert(genre.end(), static_cast<size_t>(item % 3), item * 10);
      ends.push_back(static_cast<int64_t>(genre.size()));
      rating.push_back(static_cast<float>(item) / 2);
    }
    CHECK_EQ(group->rows, static_cast<int64_t>(items.size()));
    CHECK(group->columns[0].ints == std::vector<int64_t>(items.size(), group->key.task));
    CHECK(group->columns[1].ints == std::vector<int64_t>(items.size(), group->key.batch));
    CHECK(group->columns[3].ints == genre);
    CHECK(group->columns[3].ends == ends);
    CHECK(group->columns[4].floats == rating);
    read.groups.emplace_back(group->key.task, group->key.batch, items);
    reader->Recycle(std::move(group));
  }
  CHECK(source->Next(&group, &problem) == Result::kEnd);
  return read;
}

Read ReadAll(const Files& files, GroupOptions options, ReaderStats* stats = nullptr) {
  GroupReader reader(std::move(options), Names(files), Opener(files), stats);
  return ReadAll(&reader, &reader);
}

ReaderCounts Counts(const ReaderStats& stats) {
  ReaderCounts counts;
  std::vector<std::string> messages;
  stats.Read(&counts, &messages);
  return counts;
}

// Five groups in two files: (1,0): 1 2 3; (1,1): 4; (2,0): 5 6 | (3,0): 7; (4,0): 8 9.
Files Five() {
  return {{"a", Record(1, 0, 1) + Record(1, 0, 2) + Record(1, 0, 3) + Record(1, 1, 4) +
                    Record(2, 0, 5) + Record(2, 0, 6)},
          {"b", Record(3, 0, 7) + Record(4, 0, 8) + Record(4, 0, 9)}};
}
const decltype(Read::groups) kFive = {
    {1, 0, {1, 2, 3}}, {1, 1, {4}}, {2, 0, {5, 6}}, {3, 0, {7}}, {4, 0, {8, 9}}};

void TestRunsBecomeGroups() {
  ReaderStats stats;
  const Read read = ReadAll(Five(), Options(), &stats);
  CHECK(read.problems.empty());
  CHECK(read.groups == kFive);
  CHECK_EQ(Counts(stats).records, 9);
  CHECK_EQ(Counts(stats).groups, 5);
  CHECK_EQ(Counts(stats).skipped, 0);
}

// Reads under both policies. Going on after a problem gives what skipping it gives.
void CheckFault(const Files& files, GroupOptions options, Fault fault, int64_t skipped,
                const decltype(Read::groups)& left, const std::string& message) {
  ReaderStats stats;
  options.on_bad = OnBad::kSkip;
  Read read = ReadAll(files, options, &stats);
  CHECK(read.groups == left);
  CHECK(read.problems.empty());
  const ReaderCounts counts = Counts(stats);
  CHECK_EQ(counts.bad[static_cast<size_t>(fault)], 1);
  CHECK_EQ(counts.skipped, skipped);
  CHECK_EQ(counts.groups, static_cast<int64_t>(left.size()));
  options.on_bad = OnBad::kRaise;
  read = ReadAll(files, options);
  CHECK(read.groups == left);
  CHECK_EQ(read.problems.size(), 1u);
  CHECK(read.problems[0].fault == fault);
  CHECK_EQ(read.problems[0].message.substr(0, message.size()), message);
  CHECK(read.problems[0].message.find('\n') == std::string::npos);
}

void TestFaults() {
  const size_t one = Record(1, 0, 1).size();
  Files files = Five();
  files["a"].resize(files["a"].size() - 1);
  auto left = kFive;
  std::get<2>(left[2]) = {5};
  CheckFault(files, Options(), Fault::kTruncated, 0, left,
             "a at byte " + std::to_string(Five()["a"].size() - Record(2, 0, 6).size()) +
                 ": the file ends inside a record; ");

  files = Five();
  files["a"][one] ^= 1;  // the length of item 2's record
  CheckFault(files, Options(), Fault::kLengthCrc, 0, {{1, 0, {1}}, {3, 0, {7}}, {4, 0, {8, 9}}},
             "a at byte " + std::to_string(one) + ": the record's length fails its checksum");

  files = Five();
  files["a"][one + 20] ^= 1;
  left = kFive;
  std::get<2>(left[0]) = {1, 3};
  CheckFault(files, Options(), Fault::kDataCrc, 1, left,
             "a at byte " + std::to_string(one) + ": the record of ");

  files = Five();
  records::AppendRecord("garbage", &files["b"]);
  CheckFault(files, Options(), Fault::kNotExample, 1, kFive,
             "b at byte " + std::to_string(Five()["b"].size()) +
                 ": the record isn't a tf.train.Example; ");

  files = Five();
  records::AppendRecord("", &files["b"]);
  CheckFault(files, Options(), Fault::kMissingColumn, 1, kFive,
             "b at byte " + std::to_string(Five()["b"].size()) +
                 ": the record has no column 'task'; read it with");

  files = Five();
  files["aa"] = "";
  CheckFault(files, Options(), Fault::kEmptyFile, 0, kFive, "aa at byte 0: the file is empty; ");

  // Within a file, and over two.
  files = Five();
  files["a"] += Record(1, 0, 10) + Record(1, 0, 11);
  CheckFault(files, Options(), Fault::kNotContiguous, 2, kFive,
             "a at byte " + std::to_string(Five()["a"].size()) +
                 ": the records of task 1, batch 0 don't stand together");
  files = Five();
  files["c"] = Record(4, 0, 10);
  CheckFault(files, Options(), Fault::kNotContiguous, 1, kFive,
             "c at byte 0: the records of task 4, batch 0 don't stand together");

  files = Five();
  files["b"] = Record(4, 0, 8) + Record(4, 0, 9) + Record(4, 0, 10);
  CheckFault(files, Options(OnBad::kRaise, 2), Fault::kTooSmall, 1,
             {{1, 0, {1, 2, 3}}, {2, 0, {5, 6}}, {4, 0, {8, 9, 10}}},
             "a at byte " +
                 std::to_string((Record(1, 0, 1) + Record(1, 0, 2) + Record(1, 0, 3)).size()) +
                 ": the group of task 1, batch 1 has 1 rows, 2 are needed; ");
}

void TestAFileThatIsMissingIsNeverSkipped() {
  const Files files = Five();
  ReaderStats stats;
  GroupReader reader(Options(OnBad::kSkip), {"a", "gone", "b"}, Opener(files), &stats);
  const Read read = ReadAll(&reader, &reader);
  CHECK_EQ(read.problems.size(), 1u);
  CHECK_EQ(read.problems[0].message,
           std::string("gone: can't be opened: no such file; check the path"));
  CHECK(read.groups == kFive);
}

void TestShuffle() {
  Files files;
  for (int file = 0; file < 4; ++file) {
    for (int task = 0; task < 25; ++task) {
      for (int row = 0; row <= task % 3; ++row) {
        files[std::to_string(file)] += Record(file * 25 + task, 0, row);
      }
    }
  }
  const auto order = [&](size_t buffer, Seed seed) {
    GroupShuffle shuffle(Options(), Names(files), Opener(files), nullptr, buffer, seed);
    std::vector<int64_t> tasks;
    for (const auto& group : ReadAll(&shuffle, &shuffle.reader()).groups) {
      tasks.push_back(std::get<0>(group));
    }
    return tasks;
  };
  std::vector<int64_t> sorted(100);
  for (size_t i = 0; i < 100; ++i) sorted[i] = static_cast<int64_t>(i);
  CHECK(order(0, {7, 7}) == sorted);
  std::set<std::vector<int64_t>> orders;
  for (size_t buffer : {1, 3, 25, 100, 1000}) {
    for (const Seed seed : {Seed{0, 0}, Seed{0, 1}, Seed{1, 0}, Seed{-1, 1}}) {
      std::vector<int64_t> tasks = order(buffer, seed);
      CHECK(tasks == order(buffer, seed));
      if (buffer == 3 || buffer == 100) CHECK(orders.insert(tasks).second);
      std::sort(tasks.begin(), tasks.end());
      CHECK(tasks == sorted);
    }
  }
  // More room than there are groups changes nothing.
  CHECK(order(100, {5, 6}) == order(1000, {5, 6}));
}

void TestDrawsAreUniform() {
  Draws draws({3, 4}, 1);
  constexpr int kFaces = 7, kThrows = 70000;
  std::vector<int> seen(kFaces);
  for (int i = 0; i < kThrows; ++i) ++seen[draws.Below(kFaces)];
  double chi = 0;
  for (const int count : seen) {
    const double miss = count - double{kThrows} / kFaces;
    chi += miss * miss / (double{kThrows} / kFaces);
  }
  CHECK(chi < 22.5);  // 6 degrees of freedom: one in a thousand is above
}

}  // namespace
}  // namespace gmeta::group_batch

int main() {
  using namespace gmeta::group_batch;
  TestRunsBecomeGroups();
  TestFaults();
  TestAFileThatIsMissingIsNeverSkipped();
  TestShuffle();
  TestDrawsAreUniform();
}
