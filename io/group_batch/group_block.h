// Parsing: turns the bytes of some groups, in either layout, into columns for all of them together.
//
// Groups that follow each other in the order of an epoch are parsed into one set of column buffers,
// so building an element is one copy per column. Each group has an entry, even a bad one,
// because a cursor counts places, not the groups found there:
//
//     entries    [task 7, rows ..3) [task 9, bad: rows ..3) [task 4, rows ..8)
//     columns    r r r | r r r r r           rows of sound groups, one after another
//     problems   (1, "FILE at byte ...")     of entry 1
//
// The index says which task, batch and number of rows to expect. Here these are compared with the
// data, field by field. In the columnar layout a bad record costs its group. In the example layout
// it costs only itself; the rest of the group stays. If the framing is lost, the group's other rows
// are lost with it, but not the next group, since the index knows its place.

#ifndef GMETA_IO_GROUP_BATCH_GROUP_BLOCK_H_
#define GMETA_IO_GROUP_BATCH_GROUP_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/group_batch/group_window.h"
#include "io/group_batch/problem.h"
#include "io/records/column.h"
#include "io/records/columnar_parser.h"
#include "io/records/example_parser.h"
#include "io/records/tfrecord.h"

namespace gmeta::group_batch {

using records::ColumnBuffer;

struct GroupBlock {
  struct Entry {
    GroupKey key;
    int64_t row_end = 0;  // end of the group's rows; that of the entry before, if it is bad
    bool sound = false;
  };
  struct Found {
    size_t entry;
    Problem problem;
  };

  std::vector<ColumnBuffer> columns;
  std::vector<Entry> entries;
  std::vector<Found> problems;  // in the order of entries

  int64_t row_begin(size_t entry) const { return entry == 0 ? 0 : entries[entry - 1].row_end; }
};

// How to read groups from their bytes.
struct BlockOptions {
  std::vector<ColumnSpec> columns;
  size_t task = 0;  // places of the key's columns
  size_t batch = 1;
  int64_t min_rows = 1;  // a smaller group is a fault
  Layout layout = Layout::kColumnar;
  std::vector<std::string> paths;  // paths of the shards
};

// The parser of one thread.
class BlockParser {
 public:
  explicit BlockParser(const BlockOptions& options)
      : options_(options),
        columnar_(options.columns, options.task, options.batch),
        example_(options.columns) {}

  // Appends a group to the block.
  void Parse(const LoadedGroup& group, GroupBlock* block) {
    GroupBlock::Entry entry;
    entry.row_end = block->entries.empty() ? 0 : block->entries.back().row_end;
    entry.key = group.entry.key;
    place_ = block->entries.size();
    if (group.data == nullptr) {
      if (group.problem.fault != Fault::kNone) block->problems.push_back({place_, group.problem});
    } else {
      Mark(*block);
      const int64_t rows = options_.layout == Layout::kColumnar ? ParseColumnar(group, block)
                                                                : ParseExamples(group, block);
      entry.sound = rows > 0;
      entry.row_end += rows;
    }
    block->entries.push_back(entry);
  }

 private:
  static constexpr const char* kCopyBoth = "prepare the data again, or copy both files";

  // Returns the number of added rows.
  int64_t ParseColumnar(const LoadedGroup& group, GroupBlock* block) {
    std::string_view left(group.data, group.size), payload;
    int64_t rows = 0;
    if (Take(group, &left, &payload, group.entry.rows, block) != Fault::kNone) return 0;
    const records::ParseResult parsed = columnar_.Parse(payload, &block->columns, &rows);
    if (parsed.fault != Fault::kNone) {
      Finding finding = ContentFinding(parsed, options_.columns);
      finding.skipped = group.entry.rows;
      return Say(group, 0, std::move(finding), block);
    }
    if (!left.empty() || rows != group.entry.rows || !(LastKey(*block) == group.entry.key)) {
      return Disagree(group, rows, 0, !left.empty(), block);
    }
    uint32_t crc;  // of the payload, which is sound; it lies after it
    std::memcpy(&crc, payload.data() + payload.size(), sizeof(crc));
    if (crc != MaskCrc(group.entry.crc)) {
      Undo(block);
      return Say(
          group, 0,
          {Fault::kIndexMismatch, rows,
           "the group of " + Name(group.entry.key) + " has changed since the index was written",
           kCopyBoth},
          block);
    }
    return Judge(group, rows, block);
  }

  int64_t ParseExamples(const LoadedGroup& group, GroupBlock* block) {
    std::string_view left(group.data, group.size), payload;
    int64_t rows = 0, seen = 0;
    bool lost = false;
    for (; !left.empty(); ++seen) {
      if (seen == group.entry.rows) return Disagree(group, rows, seen - rows, true, block);
      const auto at = static_cast<uint64_t>(group.size - left.size());
      const Fault fault = Take(group, &left, &payload, group.entry.rows - seen, block);
      lost = fault != Fault::kNone && fault != Fault::kDataCrc;
      if (fault != Fault::kNone) continue;
      const records::ParseResult parsed = example_.Parse(payload, &block->columns);
      if (parsed.fault != Fault::kNone) {
        Say(group, at, ContentFinding(parsed, options_.columns), block);
      } else if (!(LastKey(*block) == group.entry.key)) {
        return Disagree(group, rows, seen - rows, true, block);
      } else {
        ++rows;
      }
    }
    if (!lost && seen != group.entry.rows) {
      return Disagree(group, rows, seen - rows, false, block);
    }
    return rows > 0 ? Judge(group, rows, block) : 0;
  }

  // Takes the next record's payload. If the record is bad, `left` continues after it, or becomes
  // empty if the next record can't be found, which costs `rest` rows.
  Fault Take(const LoadedGroup& group, std::string_view* left, std::string_view* payload,
             int64_t rest, GroupBlock* block) {
    const uint64_t at = group.size - left->size();
    uint64_t length = 0;
    const Fault fault = records::TakeRecord(left, payload, &length);
    if (fault == Fault::kNone) return fault;
    Finding finding = FramingFinding(fault, length, "");
    if (fault == Fault::kTruncated) {
      finding.what = "a record reaches beyond its group, which the index says has " +
                     std::to_string(group.size) + " bytes";
    }
    if (fault != Fault::kDataCrc) *left = {};
    if (fault != Fault::kDataCrc || options_.layout == Layout::kColumnar) finding.skipped = rest;
    Say(group, at, std::move(finding), block);
    return fault;
  }

  int64_t Judge(const LoadedGroup& group, int64_t rows, GroupBlock* block) {
    if (rows >= options_.min_rows) return rows;
    Undo(block);
    return Say(group, 0, SmallFinding(group.entry.key, rows, options_.min_rows), block);
  }

  // Reports a group that differs from the index. `rows` were added; `told` were left out and
  // counted before.
  int64_t Disagree(const LoadedGroup& group, int64_t rows, int64_t told, bool more,
                   GroupBlock* block) {
    const bool added = block->columns[options_.task].ints.size() > marks_[options_.task].first;
    const std::string found = added ? Name(LastKey(*block)) : "nothing";
    Undo(block);
    return Say(group, 0,
               {Fault::kIndexMismatch, group.entry.rows - told,
                "the index says " + Name(group.entry.key) + ", " +
                    std::to_string(group.entry.rows) + " rows; there are " + found + ", " +
                    std::to_string(rows) + " rows" + (more ? " and more" : ""),
                kCopyBoth},
               block);
  }

  int64_t Say(const LoadedGroup& group, uint64_t at, Finding finding, GroupBlock* block) {
    const uint64_t offset = static_cast<uint64_t>(group.entry.offset) + at;
    block->problems.push_back(
        {place_, Located(options_.paths[group.shard], offset, std::move(finding))});
    return 0;
  }

  GroupKey LastKey(const GroupBlock& block) const {
    return {block.columns[options_.task].ints.back(), block.columns[options_.batch].ints.back()};
  }

  void Mark(const GroupBlock& block) {
    marks_.resize(block.columns.size());
    for (size_t i = 0; i < marks_.size(); ++i) {
      const ColumnBuffer& column = block.columns[i];
      marks_[i] = {column.size(options_.columns[i].dtype), column.ends.size()};
    }
  }

  // Removes everything appended since Mark().
  void Undo(GroupBlock* block) const {
    for (size_t i = 0; i < marks_.size(); ++i) {
      block->columns[i].Truncate(options_.columns[i].dtype, marks_[i].first);
      block->columns[i].ends.resize(marks_[i].second);
    }
  }

  const BlockOptions& options_;
  records::ColumnarParser columnar_;
  records::ExampleParser example_;
  std::vector<std::pair<size_t, size_t>> marks_;
  size_t place_ = 0;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_GROUP_BLOCK_H_
