// The ways in which a record, a file or a group can be bad: one list, so that all readers count,
// name and report them alike.

#ifndef GMETA_IO_RECORDS_FAULT_H_
#define GMETA_IO_RECORDS_FAULT_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace gmeta::records {

enum class Fault : int {
  kNone = 0,
  // Framing. After the first two the next record can't be found: the rest of the file is lost.
  kTruncated,  // the file ends inside a record
  kLengthCrc,  // the length doesn't match its checksum
  kDataCrc,    // the payload doesn't match its checksum
  // Content.
  kNotExample,     // the payload isn't a tf.train.Example
  kMissingColumn,  // a column of the schema is missing
  kWrongType,      // a column holds a list of another type
  kNotScalar,      // a column of one value a record has none or several
  kNotColumnar,    // the payload isn't a group in the columnar layout
  kNewerLayout,    // its version or codec isn't known here
  kWrongKey,       // the group was made with other columns than the schema's task and batch
  // Files and groups.
  kNotContiguous,  // the records of a group aren't consecutive
  kTooSmall,       // a group with fewer rows than required
  kBadIndex,       // the index of a shard is malformed, or belongs to another shard
  kIndexMismatch,  // a group differs from the index's entry for it
  // Histories that examples are given.
  kDamagedHistory,  // a stripe of it is damaged
  kOtherHistory,    // it isn't what the ranker saw
  // The machine, not the data: never skipped.
  kNoCodec,  // a record is compressed, and its decompressor is missing
  kOpen,
  kRead,
};

inline constexpr size_t kFaults = static_cast<size_t>(Fault::kRead) + 1;

// Names of the counters that Python reads; that of Fault::kNone is empty.
inline constexpr std::array<const char*, kFaults> kFaultNames = {"",
                                                                 "truncated",
                                                                 "length_crc",
                                                                 "data_crc",
                                                                 "not_example",
                                                                 "missing_column",
                                                                 "wrong_type",
                                                                 "not_scalar",
                                                                 "not_columnar",
                                                                 "newer_layout",
                                                                 "wrong_key",
                                                                 "not_contiguous",
                                                                 "too_small",
                                                                 "bad_index",
                                                                 "index_mismatch",
                                                                 "damaged_history",
                                                                 "other_history",
                                                                 "no_codec",
                                                                 "open",
                                                                 "read"};

// Returns whether the fault lies in the machine (a file that can't be opened or read) and not in
// the data.
inline constexpr bool IsFatal(Fault fault) {
  return fault == Fault::kNoCodec || fault == Fault::kOpen || fault == Fault::kRead;
}

// The result of parsing a record.
struct ParseResult {
  Fault fault = Fault::kNone;
  int column = -1;    // index of the bad column in the schema, if one is bad
  int64_t found = 0;  // kNotScalar: how many values; kWrongType: the list's field in a Feature (2
                      // is float, 3 int64); kNewerLayout: version + 65536 * flags
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_FAULT_H_
