// Two files read from beginning to end by the GroupReader, under both policies.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/group_batch.h"
#include "tests/native/check.h"
#include "tests/native/fuzz/tables.h"
#include "tests/native/fuzz/target.h"
#include "tests/native/memory_source.h"

namespace gmeta::fuzz {
namespace {

using group_batch::Group;
using group_batch::GroupReader;
using group_batch::OnBad;
using group_batch::Problem;

constexpr int64_t kMinRows = 2;

struct Reading {
  std::vector<Group> groups;
  size_t problems = 0;
  group_batch::ReaderCounts counts;
};

Reading Read(const Input& files, Layout layout, OnBad on_bad) {
  const Wanted wanted = Written();
  group_batch::GroupOptions options;
  options.columns = wanted.columns;
  options.task = wanted.task;
  options.batch = wanted.batch;
  options.min_rows = kMinRows;
  options.layout = layout;
  options.on_bad = on_bad;
  options.records = {64, 4000};
  std::vector<std::string> names;
  size_t bytes = 0;
  for (const std::string& file : files) {
    names.push_back(std::to_string(names.size()));
    bytes += file.size();
  }
  group_batch::ReaderStats stats;
  const auto open = [&](const std::string& path, std::string*) {
    return std::make_unique<records::MemorySource>(files[std::stoul(path)]);
  };
  GroupReader reader(options, names, open, &stats);
  Reading reading;
  std::set<std::pair<int64_t, int64_t>> keys;
  // Each record, and the end of each file, may be at fault, and so may each group.
  for (size_t calls = 0;; ++calls) {
    CHECK(calls <= 2 * (bytes / 16 + 2 * files.size()) + 1);
    std::unique_ptr<Group> group;
    Problem problem;
    const GroupReader::Result result = reader.Next(&group, &problem);
    if (result == GroupReader::Result::kEnd) break;
    if (result == GroupReader::Result::kProblem) {
      CHECK(on_bad == OnBad::kRaise);
      CheckMessage(problem);
      ++reading.problems;
      continue;
    }
    CHECK(group->rows >= kMinRows);
    CheckInStep(wanted.columns, group->columns, group->rows);
    CheckKey(wanted, group->columns, 0, group->rows, group->key);
    CHECK(keys.emplace(group->key.task, group->key.batch).second);
    reading.groups.push_back(*group);
    reader.Recycle(std::move(group));
  }
  std::vector<std::string> messages;
  stats.Read(&reading.counts, &messages);
  return reading;
}

class GroupsTarget : public Target {
 public:
  explicit GroupsTarget(Layout layout) : layout_(layout) {}

  std::string name() const override {
    return layout_ == Layout::kExample ? "example-groups" : "columnar-groups";
  }

  size_t growth() const override { return layout_ == Layout::kColumnar ? kCompressed : kPlain; }

  std::vector<Input> Seeds() const override {
    const std::string first = SampleFile(layout_, false), second = SampleFile(layout_, true);
    return {{first, second}, {first, first}, {"", second}};
  }

  void Run(const Input& input) override {
    const Reading raised = Read(input, layout_, OnBad::kRaise);
    const Reading skipped = Read(input, layout_, OnBad::kSkip);
    // Going on after an error is leaving what is bad out.
    CHECK_EQ(raised.groups.size(), skipped.groups.size());
    int64_t rows = 0;
    for (size_t i = 0; i < raised.groups.size(); ++i) {
      CHECK(raised.groups[i].key == skipped.groups[i].key);
      CHECK(records::Same(raised.groups[i].columns, skipped.groups[i].columns));
      rows += raised.groups[i].rows;
    }
    size_t faults = 0;
    for (const int64_t count : skipped.counts.bad) faults += static_cast<size_t>(count);
    CHECK_EQ(faults, raised.problems);
    CHECK_EQ(skipped.counts.records, rows);
    CHECK_EQ(skipped.counts.skipped, raised.counts.skipped);
    // A record is in a group or left out, once. An example takes 16 bytes.
    if (layout_ == Layout::kExample) {
      CHECK(static_cast<size_t>(rows + skipped.counts.skipped) * 16 <= Size(input));
    }
  }

 private:
  const Layout layout_;
};

}  // namespace

std::vector<std::unique_ptr<Target>> GroupTargets() {
  std::vector<std::unique_ptr<Target>> targets;
  targets.push_back(std::make_unique<GroupsTarget>(Layout::kExample));
  targets.push_back(std::make_unique<GroupsTarget>(Layout::kColumnar));
  return targets;
}

}  // namespace gmeta::fuzz
