// Encodes rows of columns as framed tf.train.Example records.
//
// An Example is a map from column names to lists, four messages deep, each with its length in
// front of it:
//
//     0A n  Example.features                                    n: features
//       0A n  Features.feature (a map entry per column)         n: entry
//         0A n <name>
//         12 n  Feature                                         n: feature
//           1A n  Feature.int64_list  (or 12: float_list)       n: list
//             0A n <packed varints> (or little-endian floats)   n: values; absent for an empty list
//
// A length comes before the bytes that it counts, so a row is walked twice: once to add up the
// sizes from the inside out, which takes no memory but one number per column, and once to write.
// Nothing is built in between: no message object, no string per value, no copy of a buffer. The
// payload's size is known before its first byte is written, so the record's frame is written in
// place around it too.
//
// Entries are written in the order of their names, as in protobuf's deterministic serialisation:
// one row has one encoding, whoever wrote it, and files can be compared byte by byte.

#ifndef GMETA_IO_RECORDS_EXAMPLE_ENCODER_H_
#define GMETA_IO_RECORDS_EXAMPLE_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "io/records/column.h"
#include "io/records/record_encoder.h"
#include "io/records/wire.h"

namespace gmeta::records {

class ExampleEncoder : public RecordEncoder {
 public:
  explicit ExampleEncoder(const std::vector<ColumnSpec>& columns) {
    for (size_t place : ByName(columns)) fields_.emplace_back(place, columns[place]);
  }

 private:
  struct Field {
    Field(size_t place, const ColumnSpec& spec)
        : place(place), dtype(spec.dtype), key(1 + VarintSize(spec.name.size()), '\0') {
      key[0] = Tag(1, kBytes);
      WriteVarint(&key[1], spec.name.size());
      key += spec.name;
    }
    size_t place;  // the column's place in the caller's order
    DType dtype;
    std::string key;    // the entry's first field, including tag and length
    size_t values = 0;  // bytes of the current row's values
    size_t list = 0;    // bytes of the messages around them, values included
    size_t feature = 0;
    size_t entry = 0;
  };

  int64_t Append(const ColumnView* views, int64_t row, int64_t end) override {
    const size_t features = Measure(views, row);
    const size_t payload = 1 + VarintSize(features) + features;
    char* out = BeginRecord(payload);
    *out++ = Tag(1, kBytes);
    out = WriteVarint(out, features);
    for (const Field& field : fields_) out = Write(field, views[field.place], row, out);
    return row + 1;
  }

  static std::pair<int64_t, int64_t> Range(const ColumnView& view, int64_t row) {
    if (view.splits == nullptr) return {row, row + 1};
    return {view.splits[row], view.splits[row + 1]};
  }

  static size_t Wrapped(size_t size) { return 1 + VarintSize(size) + size; }

  size_t Measure(const ColumnView* views, int64_t row) {
    size_t features = 0;
    for (Field& field : fields_) {
      const ColumnView& view = views[field.place];
      const auto [begin, end] = Range(view, row);
      if (field.dtype == DType::kFloat32) {
        field.values = static_cast<size_t>(end - begin) * sizeof(float);
      } else {
        const auto* values = static_cast<const int64_t*>(view.values);
        field.values = 0;
        for (int64_t i = begin; i < end; ++i) {
          field.values += VarintSize(static_cast<uint64_t>(values[i]));
        }
      }
      field.list = field.values == 0 ? 0 : Wrapped(field.values);
      field.feature = Wrapped(field.list);
      field.entry = field.key.size() + Wrapped(field.feature);
      features += Wrapped(field.entry);
    }
    return features;
  }

  static char* Write(const Field& field, const ColumnView& view, int64_t row, char* out) {
    *out++ = Tag(1, kBytes);
    out = WriteVarint(out, field.entry);
    std::memcpy(out, field.key.data(), field.key.size());
    out += field.key.size();
    *out++ = Tag(2, kBytes);
    out = WriteVarint(out, field.feature);
    *out++ = field.dtype == DType::kFloat32 ? Tag(2, kBytes) : Tag(3, kBytes);
    out = WriteVarint(out, field.list);
    if (field.values == 0) return out;
    *out++ = Tag(1, kBytes);
    out = WriteVarint(out, field.values);
    const auto [begin, end] = Range(view, row);
    if (field.dtype == DType::kFloat32) {
      std::memcpy(out, static_cast<const float*>(view.values) + begin, field.values);
      return out + field.values;
    }
    const auto* values = static_cast<const int64_t*>(view.values);
    for (int64_t i = begin; i < end; ++i) out = WriteVarint(out, static_cast<uint64_t>(values[i]));
    return out;
  }

  std::vector<Field> fields_;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_EXAMPLE_ENCODER_H_
