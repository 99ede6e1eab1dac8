// The ways in which a record, a file or a group can be bad: one list, so that readers count, name
// and report all of them alike.

#ifndef GMETA_IO_RECORDS_FAULT_H_
#define GMETA_IO_RECORDS_FAULT_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace gmeta::records {

enum class Fault : int {
  kNone = 0,
  // Framing. The first two leave no way to find the next record: the rest of the file is lost.
  kTruncated,  // the file ends inside a record
  kLengthCrc,  // the length doesn't match its checksum
  kDataCrc,    // the payload doesn't match its checksum
  kTooLong,    // a sound length, but above the limit
  // Content.
  kNotExample,     // the payload isn't a tf.train.Example
  kMissingColumn,  // a column of the schema isn't there
  kWrongType,      // a column holds a list of another type
  kNotScalar,      // a column of one value a record holds none or several
  kNotColumnar,    // the payload isn't a group in the columnar layout
  kNewerLayout,    // it is one of a version, or with a codec, that isn't known here
  kWrongKey,       // the group was cut by other columns than the schema's task and batch
  // Files and groups.
  kEmptyFile,      // a file without records
  kNotContiguous,  // the records of a group don't stand together
  kTooSmall,       // a group with fewer rows than asked for
  kBadIndex,       // the index of a shard isn't one, or is that of another
  kIndexMismatch,  // a group isn't the one that the index has in its place
  // The machine, not the data: never skipped.
  kNoCodec,  // a record is compressed, and what decompresses it isn't there
  kOpen,
  kRead,
};

inline constexpr size_t kFaults = static_cast<size_t>(Fault::kRead) + 1;

// Names in the counters that Python reads; Fault::kNone has an empty one.
inline constexpr std::array<const char*, kFaults> kFaultNames = {"",
                                                                 "truncated",
                                                                 "length_crc",
                                                                 "data_crc",
                                                                 "too_long",
                                                                 "not_example",
                                                                 "missing_column",
                                                                 "wrong_type",
                                                                 "not_scalar",
                                                                 "not_columnar",
                                                                 "newer_layout",
                                                                 "wrong_key",
                                                                 "empty_file",
                                                                 "not_contiguous",
                                                                 "too_small",
                                                                 "bad_index",
                                                                 "index_mismatch",
                                                                 "no_codec",
                                                                 "open",
                                                                 "read"};

// Whether the fault lies in the machine (a file that can't be opened or read) and not in the data.
inline constexpr bool IsFatal(Fault fault) {
  return fault == Fault::kNoCodec || fault == Fault::kOpen || fault == Fault::kRead;
}

// What a parser made of a record.
struct ParseResult {
  Fault fault = Fault::kNone;
  int column = -1;    // of the schema: which one is at fault, where one is
  int64_t found = 0;  // kNotScalar: how many values; kWrongType: the list's field in a Feature (2
                      // is float, 3 int64); kNewerLayout: version + 65536 * flags
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_FAULT_H_
