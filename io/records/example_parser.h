// Parses tf.train.Example records into columns.
//
// The parser walks the payload in place (example_encoder.h draws its nesting) and appends the
// values of the wanted columns to one array each. It builds no message object, and copies a
// value only to its final place. Three things keep it fast and safe:
//
//   Prediction   Records of one file name their columns in one order. The parser remembers which
//                column was at each place of the last record and compares that one name. It looks
//                the name up only if it differs.
//   Rollback     A record is appended wholly or not at all. The arrays' sizes are noted before it
//                and restored if it turns out bad, so the caller may skip it and go on.
//   Bounds       Every read is checked against the message that contains it (wire.h), and arrays
//                grow only by values that were present, at least a byte each: the payload's size
//                bounds the memory, whatever its lengths claim.
//
// The parser accepts what protobuf accepts: packed and unpacked lists, unknown columns and fields,
// lists in several pieces, a name given twice (the last one counts), a oneof set twice (likewise).
// A Feature without any list counts as a missing column.

#ifndef GMETA_IO_RECORDS_EXAMPLE_PARSER_H_
#define GMETA_IO_RECORDS_EXAMPLE_PARSER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/records/column.h"
#include "io/records/fault.h"
#include "io/records/wire.h"

namespace gmeta::records {

class ExampleParser {
 public:
  explicit ExampleParser(std::vector<ColumnSpec> columns)
      : columns_(std::move(columns)),
        order_(columns_.empty() ? 0 : kPredicted),
        starts_(columns_.size()),
        seen_(columns_.size()) {
    for (size_t i = 0; i < columns_.size(); ++i) index_.emplace(columns_[i].name, int(i));
  }
  // index_ refers to the strings in columns_.
  ExampleParser(const ExampleParser&) = delete;
  ExampleParser& operator=(const ExampleParser&) = delete;

  const std::vector<ColumnSpec>& columns() const { return columns_; }

  // Appends one row to `buffers` (one per column, in the constructor's order); on a fault, nothing.
  ParseResult Parse(std::string_view payload, std::vector<ColumnBuffer>* buffers) {
    for (size_t i = 0; i < columns_.size(); ++i) {
      starts_[i] = (*buffers)[i].size(columns_[i].dtype);
      seen_[i] = false;
    }
    ParseResult result = ParseExample(payload, buffers);
    if (result.fault == Fault::kNone) result = Close(buffers);
    if (result.fault != Fault::kNone) {
      for (size_t i = 0; i < columns_.size(); ++i) {
        (*buffers)[i].Truncate(columns_[i].dtype, starts_[i]);
      }
    }
    return result;
  }

 private:
  enum Kind : uint32_t { kNoList = 0, kBytesList = 1, kFloatList = 2, kInt64List = 3 };
  static constexpr size_t kPredicted = 256;  // predicted places; later ones are looked up
  static constexpr ParseResult kMalformed{Fault::kNotExample, -1, 0};

  // Checks that every column is present, and adds the row's end to the lists.
  ParseResult Close(std::vector<ColumnBuffer>* buffers) {
    for (size_t i = 0; i < columns_.size(); ++i) {
      const size_t size = (*buffers)[i].size(columns_[i].dtype);
      if (!seen_[i]) return {Fault::kMissingColumn, int(i), 0};
      if (!columns_[i].is_list && size - starts_[i] != 1) {
        return {Fault::kNotScalar, int(i), static_cast<int64_t>(size - starts_[i])};
      }
    }
    for (size_t i = 0; i < columns_.size(); ++i) {
      ColumnBuffer& buffer = (*buffers)[i];
      if (columns_[i].is_list) {
        buffer.ends.push_back(static_cast<int64_t>(buffer.size(columns_[i].dtype)));
      }
    }
    return {};
  }

  ParseResult ParseExample(std::string_view payload, std::vector<ColumnBuffer>* buffers) {
    WireReader example(payload);
    size_t place = 0;
    while (!example.done()) {
      uint32_t field, type;
      if (!example.ReadTag(&field, &type)) return kMalformed;
      if (field != 1 || type != kBytes) {
        if (!example.Skip(type)) return kMalformed;
        continue;
      }
      std::string_view bytes;
      if (!example.ReadBytes(&bytes)) return kMalformed;
      WireReader features(bytes);
      while (!features.done()) {
        if (!features.ReadTag(&field, &type)) return kMalformed;
        if (field != 1 || type != kBytes) {
          if (!features.Skip(type)) return kMalformed;
          continue;
        }
        if (!features.ReadBytes(&bytes)) return kMalformed;
        const ParseResult result = ParseEntry(bytes, place++, buffers);
        if (result.fault != Fault::kNone) return result;
      }
    }
    return {};
  }

  ParseResult ParseEntry(std::string_view bytes, size_t place, std::vector<ColumnBuffer>* buffers) {
    WireReader entry(bytes);
    std::string_view name, feature;
    while (!entry.done()) {
      uint32_t field, type;
      if (!entry.ReadTag(&field, &type)) return kMalformed;
      const bool ok = type == kBytes && field == 1   ? entry.ReadBytes(&name)
                      : type == kBytes && field == 2 ? entry.ReadBytes(&feature)
                                                     : entry.Skip(type);
      if (!ok) return kMalformed;
    }
    const int column = Find(name, place);
    if (column < 0) return {};
    const ColumnSpec& spec = columns_[column];
    ColumnBuffer& buffer = (*buffers)[column];
    buffer.Truncate(spec.dtype, starts_[column]);  // if a name repeats, the last counts
    uint32_t kind = kNoList;
    if (!ParseFeature(feature, spec.dtype, starts_[column], &buffer, &kind)) return kMalformed;
    seen_[column] = kind != kNoList;
    const uint32_t wanted = spec.dtype == DType::kInt64 ? kInt64List : kFloatList;
    if (kind != kNoList && kind != wanted) return {Fault::kWrongType, column, kind};
    return {};
  }

  static bool ParseFeature(std::string_view bytes, DType dtype, size_t start, ColumnBuffer* buffer,
                           uint32_t* kind) {
    WireReader feature(bytes);
    while (!feature.done()) {
      uint32_t field, type;
      std::string_view list;
      if (!feature.ReadTag(&field, &type)) return false;
      if (field > kInt64List || type != kBytes) {
        if (!feature.Skip(type)) return false;
        continue;
      }
      if (!feature.ReadBytes(&list)) return false;
      if (*kind != field) buffer->Truncate(dtype, start);  // if it repeats, the last counts
      *kind = field;
      if (field == kInt64List && dtype == DType::kInt64) {
        if (!ParseInts(list, &buffer->ints)) return false;
      } else if (field == kFloatList && dtype == DType::kFloat32) {
        if (!ParseFloats(list, &buffer->floats)) return false;
      }
    }
    return true;
  }

  static bool ParseInts(std::string_view bytes, std::vector<int64_t>* values) {
    WireReader list(bytes);
    while (!list.done()) {
      uint32_t field, type;
      uint64_t value;
      std::string_view packed;
      if (!list.ReadTag(&field, &type)) return false;
      if (field == 1 && type == kBytes) {
        if (!list.ReadBytes(&packed)) return false;
        for (WireReader run(packed); !run.done();) {
          if (!run.ReadVarint(&value)) return false;
          values->push_back(static_cast<int64_t>(value));
        }
      } else if (field == 1 && type == kVarint) {
        if (!list.ReadVarint(&value)) return false;
        values->push_back(static_cast<int64_t>(value));
      } else if (!list.Skip(type)) {
        return false;
      }
    }
    return true;
  }

  static bool ParseFloats(std::string_view bytes, std::vector<float>* values) {
    WireReader list(bytes);
    while (!list.done()) {
      uint32_t field, type;
      float value;
      std::string_view packed;
      if (!list.ReadTag(&field, &type)) return false;
      if (field == 1 && type == kBytes) {
        if (!list.ReadBytes(&packed) || packed.size() % sizeof(value) != 0) return false;
        for (WireReader run(packed); run.ReadFloat(&value);) values->push_back(value);
      } else if (field == 1 && type == kFixed32) {
        if (!list.ReadFloat(&value)) return false;
        values->push_back(value);
      } else if (!list.Skip(type)) {
        return false;
      }
    }
    return true;
  }

  // Returns the column called `name`, or -1.
  int Find(std::string_view name, size_t place) {
    const bool known = place < order_.size();
    if (known && columns_[order_[place]].name == name) return order_[place];
    const auto found = index_.find(name);
    if (found == index_.end()) return -1;
    if (known) order_[place] = found->second;
    return found->second;
  }

  const std::vector<ColumnSpec> columns_;
  std::unordered_map<std::string_view, int> index_;
  std::vector<int> order_;      // place in the last record -> column; a guess
  std::vector<size_t> starts_;  // sizes of the buffers before this record
  std::vector<char> seen_;      // columns found in this record
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_EXAMPLE_PARSER_H_
