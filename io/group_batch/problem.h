// How readers describe bad data: the key of a group, the rule for faults, and the message for each
// fault.
//
// The code that walks, parses or groups records finds a fault (records/fault.h). The reader decides
// where to report it, and whether it ends the reading. So finding makes a Finding (what is wrong,
// how many records it costs, what to do), and the reader puts the place in front of it. In this way
// all readers use the same words, and Python finds file and offset in all of them
// (gmeta/io/reader_stats.py).

#ifndef GMETA_IO_GROUP_BATCH_PROBLEM_H_
#define GMETA_IO_GROUP_BATCH_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/records/column.h"
#include "io/records/fault.h"

namespace gmeta::group_batch {

using records::ColumnSpec;
using records::Fault;

enum class OnBad { kRaise, kSkip };

// How a file's records are encoded: one tf.train.Example for each row, or the columns of a group in
// one record.
enum class Layout { kExample = 0, kColumnar = 1 };

struct GroupKey {
  int64_t task = 0;
  int64_t batch = 0;
  bool operator==(const GroupKey& other) const {
    return task == other.task && batch == other.batch;
  }
};

inline std::string Name(const GroupKey& key) {
  return "task " + std::to_string(key.task) + ", batch " + std::to_string(key.batch);
}

// What is wrong and where, in one line: "FILE at byte OFFSET: what; what to do".
struct Problem {
  Fault fault = Fault::kNone;
  std::string message;
  int64_t skipped = 0;  // number of records that it costs
};

// What is wrong, without the place.
struct Finding {
  Fault fault = Fault::kNone;
  int64_t skipped = 0;
  std::string what;
  std::string advice;
};

inline constexpr const char* kRemake = "make the file again";

inline Problem Located(const std::string& path, uint64_t offset, Finding finding) {
  std::string message =
      path + " at byte " + std::to_string(offset) + ": " + finding.what + "; " + finding.advice;
  if (!records::IsFatal(finding.fault)) message += ", or pass on_bad='skip' to leave it out";
  return {finding.fault, std::move(message), finding.skipped};
}

inline Problem CantOpen(const std::string& path, const std::string& error) {
  return {Fault::kOpen, path + ": can't be opened: " + error + "; check the path", 0};
}

// Describes a record with bad framing. `length` is the one that its header states.
inline Finding FramingFinding(Fault fault, uint64_t length, const std::string& error) {
  switch (fault) {
    case Fault::kTruncated:
      return {fault, 0, "the file ends inside a record", kRemake};
    case Fault::kLengthCrc:
      return {fault, 0, "the record's length fails its checksum, so the rest can't be read",
              "check that this is an uncompressed TFRecord file and make it again"};
    case Fault::kDataCrc:
      return {fault, 1, "the record of " + std::to_string(length) + " bytes fails its checksum",
              kRemake};
    default:
      return {Fault::kRead, 0, "can't be read: " + error, "check the file system"};
  }
}

// Describes a record with bad content.
inline Finding ContentFinding(const records::ParseResult& parsed,
                              const std::vector<ColumnSpec>& columns) {
  static constexpr const char* kLists[] = {"no", "a bytes", "a float", "an int64"};
  static constexpr const char* kSchema = "read it with the schema that it was written with";
  if (parsed.fault == Fault::kNewerLayout) {
    return {parsed.fault, 1,
            "the record is of version " + std::to_string(parsed.found & 0xffff) + ", flags " +
                std::to_string(parsed.found >> 16) +
                ", of the columnar layout, which aren't known here",
            "read it with a newer gmeta"};
  }
  if (parsed.fault == Fault::kNoCodec) {
    return {parsed.fault, 0, "the record is compressed with zstd, and there is no libzstd.so.1",
            "install it (Debian: apt-get install libzstd1)"};
  }
  if (parsed.fault == Fault::kNotColumnar) {
    return {parsed.fault, 1, "the record isn't a group in the columnar layout",
            "check the layout that the file was written in, or make it again"};
  }
  if (parsed.column < 0) return {parsed.fault, 1, "the record isn't a tf.train.Example", kRemake};
  const ColumnSpec& column = columns[static_cast<size_t>(parsed.column)];
  std::string what = "column '" + column.name + "'";
  if (parsed.fault == Fault::kMissingColumn) {
    what = "the record has no " + what;
  } else if (parsed.fault == Fault::kWrongType) {
    what += std::string(" holds ") + kLists[parsed.found] + " list, the schema says " +
            records::Name(column.dtype);
  } else if (parsed.fault == Fault::kWrongKey) {
    what += " isn't what the group was cut by, as the schema says";
  } else {
    what += " holds " + std::to_string(parsed.found) + " values, the schema says one";
  }
  return {parsed.fault, 1, std::move(what), kSchema};
}

inline Finding SmallFinding(const GroupKey& key, int64_t rows, int64_t least) {
  return {Fault::kTooSmall, rows,
          "the group of " + Name(key) + " has " + std::to_string(rows) + " rows, " +
              std::to_string(least) + " are needed",
          "ask for fewer"};
}

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_PROBLEM_H_
