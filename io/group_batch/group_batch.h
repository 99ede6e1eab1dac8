// Grouping: reads the records of many files, and outputs groups of records with equal (task,
// batch_id).
//
// Meta-learning needs the samples of one task together. Preprocessing has sorted them, so a group
// is a run of consecutive records with one key, and grouping is one pass with one open group. It
// needs no hash of tasks to half-filled buffers, no window to tune, and the memory of one group.
//
//     records     7 7 7 | 9 9 | 12 12 12 12 | ...        the key of each
//     open group  [7 7 7]   then a record with key 9 arrives: 7 is closed and handed out
//
// Layout. A group holds its rows by column, parsed straight into the arrays that they stay in. A
// record's key is known only after parsing, when its row is already in the open group. If the key
// is new, that row is moved to a fresh group. That costs one row's copy per group, and saves
// parsing the key of every record separately. Recycle() returns used groups together with their
// arrays' capacity, so a steady state allocates nothing.
//
// Invariants.
//   - A key is closed once per epoch. If a run opens a key again (the input isn't sorted, or a
//     group was split over files), the whole run is a fault. To detect this, a set holds the closed
//     keys; it takes 16 bytes and a node per group.
//   - A group never spans files: the end of a file closes it.
//   - Each record is counted once: in a group that was handed out, or as skipped.
//
// Faults (records/fault.h). When Next() reports a fault, it has already skipped the bad data. So
// OnBad::kSkip is "count it and go on", and a caller that got a fault may call Next() again too. A
// bad record costs only itself, a file that lost its framing costs its rest, and a bad group costs
// its rows. The other rows of a group with a bad record stay. A file that can't be opened or read
// isn't a bad record but a missing part of the data: it is reported under either policy.

#ifndef GMETA_IO_GROUP_BATCH_GROUP_BATCH_H_
#define GMETA_IO_GROUP_BATCH_GROUP_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "io/group_batch/problem.h"
#include "io/group_batch/reader_stats.h"
#include "io/records/column.h"
#include "io/records/columnar_parser.h"
#include "io/records/example_parser.h"
#include "io/records/tfrecord.h"

namespace gmeta::group_batch {

using records::ColumnBuffer;

struct Group {
  GroupKey key;
  int64_t rows = 0;
  std::vector<ColumnBuffer> columns;  // in the schema's order, including the key's columns
  uint64_t offset = 0;                // of the group's first record in its file
  bool reopened = false;              // the key had been closed before
};

// Opens a file, or returns null and sets `error` to the reason.
using OpenFile = std::function<std::unique_ptr<records::ByteSource>(const std::string& path,
                                                                    std::string* error)>;

struct GroupOptions {
  std::vector<ColumnSpec> columns;
  size_t task = 0;  // places of the key's columns; each column is a single int64
  size_t batch = 1;
  int64_t min_rows = 1;  // a smaller group is a fault
  Layout layout = Layout::kExample;
  OnBad on_bad = OnBad::kRaise;
  records::RecordReader::Options records;
};

class GroupReader {
 public:
  enum class Result { kGroup, kEnd, kProblem };

  // `stats` may be null; otherwise it must outlive the reader.
  GroupReader(GroupOptions options, std::vector<std::string> files, OpenFile open,
              ReaderStats* stats)
      : options_(std::move(options)),
        files_(std::move(files)),
        open_(std::move(open)),
        stats_(stats),
        parser_(options_.columns),
        group_parser_(options_.columns, options_.task, options_.batch) {}

  // Sets how faults are treated from now on, and where they are counted.
  void SetPolicy(OnBad on_bad, ReaderStats* stats) {
    options_.on_bad = on_bad;
    stats_ = stats;
  }

  // Returns the next sound group in the files' order, reports a problem, or returns kEnd when
  // everything is read.
  Result Next(std::unique_ptr<Group>* group, Problem* problem) {
    while (true) {
      if (reader_ == nullptr) {
        if (file_ == files_.size()) return Result::kEnd;
        if (!Open(problem)) return Result::kProblem;
      }
      std::string_view payload;
      Fault fault;
      if (!reader_->Next(&payload, &fault)) {
        const bool empty = source_->size() == 0;
        std::unique_ptr<Group> last = std::move(open_group_);
        if (empty && Report({Fault::kEmptyFile, 0, "the file is empty", kRemake}, 0, problem)) {
          CloseFile();
          return Result::kProblem;
        }
        const Result result = Close(std::move(last), group, problem);
        CloseFile();
        if (result != Result::kEnd) return result;
        continue;
      }
      std::unique_ptr<Group> closed;
      if (fault != Fault::kNone ? Report(Framing(fault), reader_->offset(), problem)
                                : Append(payload, &closed, problem)) {
        return Result::kProblem;
      }
      const Result result = Close(std::move(closed), group, problem);
      if (result != Result::kEnd) return result;
    }
  }

  // Takes back a group that is no longer needed, to reuse its memory.
  void Recycle(std::unique_ptr<Group> group) {
    if (spare_.size() < kSpare) spare_.push_back(std::move(group));
  }

 private:
  static constexpr size_t kSpare = 64;

  struct KeyHash {
    size_t operator()(const GroupKey& key) const {
      uint64_t h = static_cast<uint64_t>(key.task) * 0x9e3779b97f4a7c15u;
      h = (h ^ (h >> 32) ^ static_cast<uint64_t>(key.batch)) * 0xd6e8feb86659fd93u;
      return static_cast<size_t>(h ^ (h >> 32));
    }
  };

  const std::string& path() const { return files_[file_]; }

  bool Open(Problem* problem) {
    std::string error;
    source_ = open_(path(), &error);
    if (source_ != nullptr) {
      reader_ = std::make_unique<records::RecordReader>(source_.get(), options_.records);
      return true;
    }
    *problem = CantOpen(path(), error);
    if (stats_ != nullptr) stats_->AddFault(Fault::kOpen, 0, problem->message);
    ++file_;
    return false;
  }

  void CloseFile() {
    reader_.reset();
    source_.reset();
    ++file_;
  }

  // Parses a record into the open group. If its key is new, the group before moves to `closed`.
  // Returns whether there is a problem to report.
  bool Append(std::string_view payload, std::unique_ptr<Group>* closed, Problem* problem) {
    if (options_.layout == Layout::kColumnar) return AppendGroup(payload, closed, problem);
    if (open_group_ == nullptr) open_group_ = NewGroup();
    const records::ParseResult parsed = parser_.Parse(payload, &open_group_->columns);
    if (parsed.fault != Fault::kNone) {
      return Report(ContentFinding(parsed, options_.columns), reader_->offset(), problem);
    }
    const GroupKey key = LastKey(*open_group_);
    if (open_group_->rows > 0 && !(key == open_group_->key)) {
      std::unique_ptr<Group> fresh = NewGroup();
      MoveLastRow(open_group_.get(), fresh.get());
      *closed = std::exchange(open_group_, std::move(fresh));
    }
    if (open_group_->rows++ == 0) Begin(key);
    return false;
  }

  // Does the same as Append for a record that holds a whole group.
  bool AppendGroup(std::string_view payload, std::unique_ptr<Group>* closed, Problem* problem) {
    std::unique_ptr<Group> fresh = NewGroup();
    const records::ParseResult parsed = group_parser_.Parse(payload, &fresh->columns, &fresh->rows);
    if (parsed.fault != Fault::kNone) {
      Recycle(std::move(fresh));
      return Report(ContentFinding(parsed, options_.columns), reader_->offset(), problem);
    }
    *closed = std::exchange(open_group_, std::move(fresh));
    Begin(LastKey(*open_group_));
    return false;
  }

  GroupKey LastKey(const Group& group) const {
    return {group.columns[options_.task].ints.back(), group.columns[options_.batch].ints.back()};
  }

  void Begin(const GroupKey& key) {
    open_group_->key = key;
    open_group_->offset = reader_->offset();
    open_group_->reopened = !keys_.insert(key).second;
  }

  // Checks a completed group. Returns kEnd if there is nothing to hand out.
  Result Close(std::unique_ptr<Group> closed, std::unique_ptr<Group>* group, Problem* problem) {
    if (closed == nullptr || closed->rows == 0) return Result::kEnd;
    bool raise = false;
    if (closed->reopened) {
      raise = Report({Fault::kNotContiguous, closed->rows,
                      "the records of " + Name(closed->key) +
                          " don't stand together: the group was closed before",
                      "sort the records by task and batch, as `gmeta prepare` does"},
                     closed->offset, problem);
    } else if (closed->rows < options_.min_rows) {
      raise = Report(SmallFinding(closed->key, closed->rows, options_.min_rows), closed->offset,
                     problem);
    } else {
      if (stats_ != nullptr) stats_->AddGroup(closed->rows);
      *group = std::move(closed);
      return Result::kGroup;
    }
    Recycle(std::move(closed));
    return raise ? Result::kProblem : Result::kEnd;
  }

  Finding Framing(Fault fault) const {
    return FramingFinding(fault, reader_->length(), options_.records.max_record, reader_->error());
  }

  // Counts a fault. Returns whether to report it to the caller.
  bool Report(Finding finding, uint64_t offset, Problem* problem) {
    Problem found = Located(path(), offset, std::move(finding));
    if (stats_ != nullptr) stats_->AddFault(found.fault, found.skipped, found.message);
    if (options_.on_bad == OnBad::kSkip && !records::IsFatal(found.fault)) return false;
    *problem = std::move(found);
    return true;
  }

  std::unique_ptr<Group> NewGroup() {
    if (spare_.empty()) {
      auto group = std::make_unique<Group>();
      group->columns.resize(options_.columns.size());
      return group;
    }
    std::unique_ptr<Group> group = std::move(spare_.back());
    spare_.pop_back();
    group->rows = 0;
    group->reopened = false;
    for (ColumnBuffer& column : group->columns) {
      column.ints.clear();
      column.floats.clear();
      column.ends.clear();
    }
    return group;
  }

  void MoveLastRow(Group* from, Group* to) const {
    for (size_t i = 0; i < options_.columns.size(); ++i) {
      ColumnBuffer& a = from->columns[i];
      ColumnBuffer& b = to->columns[i];
      const records::DType dtype = options_.columns[i].dtype;
      size_t start = a.size(dtype) - 1;
      if (options_.columns[i].is_list) {
        b.ends.push_back(a.ends.back());
        a.ends.pop_back();
        start = a.ends.empty() ? 0 : static_cast<size_t>(a.ends.back());
        b.ends.back() -= static_cast<int64_t>(start);
      }
      if (dtype == records::DType::kInt64) {
        b.ints.assign(a.ints.begin() + static_cast<std::ptrdiff_t>(start), a.ints.end());
      } else {
        b.floats.assign(a.floats.begin() + static_cast<std::ptrdiff_t>(start), a.floats.end());
      }
      a.Truncate(dtype, start);
    }
  }

  GroupOptions options_;
  const std::vector<std::string> files_;
  const OpenFile open_;
  ReaderStats* stats_;
  records::ExampleParser parser_;
  records::ColumnarParser group_parser_;
  size_t file_ = 0;  // the file being read
  std::unique_ptr<records::ByteSource> source_;
  std::unique_ptr<records::RecordReader> reader_;
  std::unique_ptr<Group> open_group_;
  std::unordered_set<GroupKey, KeyHash> keys_;  // of groups that were opened this epoch
  std::vector<std::unique_ptr<Group>> spare_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_GROUP_BATCH_H_
