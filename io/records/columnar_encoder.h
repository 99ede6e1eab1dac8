// Encodes rows of columns as framed groups in the columnar layout (columnar.h).
//
// A first pass over a group's values finds the widths of its columns. A signed number v fits b bits
// when v ^ (v >> 63), its distance from 0 or -1, fits b - 1. So OR-ing that over a column gives the
// width of the widest, without a branch. Then the size of the payload is known, and the second pass
// writes it in place.

#ifndef GMETA_IO_RECORDS_COLUMNAR_ENCODER_H_
#define GMETA_IO_RECORDS_COLUMNAR_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "io/records/columnar.h"
#include "io/records/record_encoder.h"
#include "io/records/wire.h"
#include "io/records/zstd.h"

namespace gmeta::records {

class ColumnarEncoder : public RecordEncoder {
 public:
  // `task` and `batch` are the places of the key's columns, each a single int64. Records are
  // compressed if `zstd` isn't null.
  ColumnarEncoder(const std::vector<ColumnSpec>& columns, size_t task, size_t batch,
                  const Zstd* zstd = nullptr)
      : task_(task), batch_(batch), zstd_(zstd) {
    AddToSchema(columns[task]);
    AddToSchema(columns[batch]);
    for (size_t place : ByName(columns)) {
      if (place == task || place == batch) continue;
      AddToSchema(columns[place]);
      fields_.push_back({place, columns[place].dtype, columns[place].is_list, {}, 0});
    }
    header_.columns = static_cast<uint32_t>(fields_.size());
    header_.schema = static_cast<uint32_t>(schema_.size());
    schema_.resize(columnar::Padded(schema_.size()));
  }

 private:
  struct Field {
    size_t place;  // the column's place in the caller's order
    DType dtype;
    bool is_list;
    columnar::Descriptor descriptor;  // of the current group
    int64_t first;                    // the first of its values
  };

  void AddToSchema(const ColumnSpec& column) {
    char number[10];
    schema_.append(number, WriteVarint(number, columnar::Kind(column.dtype, column.is_list)));
    schema_.append(number, WriteVarint(number, column.name.size()));
    schema_ += column.name;
  }

  // Appends a group as one record. All its rows must have one key.
  int64_t Append(const ColumnView* views, int64_t row, int64_t end) override {
    const auto rows = static_cast<size_t>(end - row);
    size_t size = sizeof(header_) + schema_.size() + fields_.size() * sizeof(uint64_t);
    if (fields_.empty()) size += columnar::Padded(rows);
    for (Field& field : fields_) size += Measure(views[field.place], row, end, &field);

    header_.rows = end - row;
    header_.task = static_cast<const int64_t*>(views[task_].values)[row];
    header_.batch = static_cast<const int64_t*>(views[batch_].values)[row];
    if (zstd_ != nullptr) return AppendCompressed(views, row, end, size - sizeof(header_));
    char* out = BeginRecord(size);
    std::memcpy(out, &header_, sizeof(header_));
    return WriteBody(views, row, end, out + sizeof(header_));
  }

  // Makes the body in a separate buffer, because its size is known only after compression.
  int64_t AppendCompressed(const ColumnView* views, int64_t row, int64_t end, uint64_t size) {
    body_.resize(size);
    WriteBody(views, row, end, body_.data());
    frame_.resize(zstd_->Bound(size));
    const size_t made = zstd_->Compress(frame_.data(), frame_.size(), body_.data(), size);
    const bool smaller = made > 0 && made + sizeof(size) < size && size <= columnar::kMaxBody;
    header_.flags = smaller ? columnar::kZstd : 0;
    char* out = BeginRecord(sizeof(header_) + (smaller ? sizeof(size) + made : size));
    std::memcpy(out, &header_, sizeof(header_));
    out += sizeof(header_);
    if (smaller) {
      std::memcpy(out, &size, sizeof(size));
      std::memcpy(out + sizeof(size), frame_.data(), made);
    } else {
      std::memcpy(out, body_.data(), size);
    }
    return end;
  }

  // Writes everything after the header, for the group that was measured last.
  int64_t WriteBody(const ColumnView* views, int64_t row, int64_t end, char* out) const {
    std::memcpy(out, schema_.data(), schema_.size());
    out += schema_.size();
    for (const Field& field : fields_) {
      const uint64_t word = field.descriptor.word();
      std::memcpy(out, &word, sizeof(word));
      out += sizeof(word);
    }
    const auto rows = static_cast<size_t>(end - row);
    if (fields_.empty()) std::memset(out, 0, columnar::Padded(rows));
    for (const Field& field : fields_) out = Write(field, views[field.place], row, end, out);
    return end;
  }

  // Sets the field's descriptor and returns the number of bytes of its arrays.
  static size_t Measure(const ColumnView& view, int64_t row, int64_t end, Field* field) {
    field->first = row;
    int64_t last = end;
    uint64_t longest = 0;
    if (field->is_list) {
      field->first = view.splits[row];
      last = view.splits[end];
      for (int64_t r = row; r < end; ++r) {
        longest |= static_cast<uint64_t>(view.splits[r + 1] - view.splits[r]);
      }
    }
    uint64_t bits = 0;
    if (field->dtype == DType::kInt64) {
      const auto* values = static_cast<const int64_t*>(view.values);
      for (int64_t i = field->first; i < last; ++i) {
        bits |= static_cast<uint64_t>(values[i] ^ (values[i] >> 63));
      }
    }
    columnar::Descriptor& descriptor = field->descriptor;
    descriptor.values = static_cast<uint64_t>(last - field->first);
    descriptor.length_width = field->is_list ? Width(longest) : 0;
    // The sign takes one more bit.
    descriptor.value_width =
        field->dtype == DType::kInt64 ? Width(bits << 1 | bits) : sizeof(float);
    return columnar::Padded(static_cast<size_t>(end - row) * descriptor.length_width) +
           columnar::Padded(descriptor.values * descriptor.value_width);
  }

  // Returns the bytes that an unsigned number takes, rounded up to a power of two.
  static uint8_t Width(uint64_t number) {
    return number >> 32 != 0 ? 8 : number >> 16 != 0 ? 4 : number >> 8 != 0 ? 2 : 1;
  }

  static char* Write(const Field& field, const ColumnView& view, int64_t row, int64_t end,
                     char* out) {
    const columnar::Descriptor& descriptor = field.descriptor;
    if (field.is_list) {
      const int64_t* splits = view.splits + row;
      const auto rows = static_cast<size_t>(end - row);
      columnar::WithUnsigned(descriptor.length_width, [&](auto zero) {
        out =
            Narrow<decltype(zero)>(rows, [&](size_t r) { return splits[r + 1] - splits[r]; }, out);
      });
    }
    if (field.dtype == DType::kFloat32) {
      const size_t size = descriptor.values * sizeof(float);
      if (size > 0) std::memcpy(out, static_cast<const float*>(view.values) + field.first, size);
      return Pad(out, size);
    }
    const auto* values = static_cast<const int64_t*>(view.values) + field.first;
    columnar::WithSigned(descriptor.value_width, [&](auto zero) {
      out = Narrow<decltype(zero)>(descriptor.values, [&](size_t i) { return values[i]; }, out);
    });
    return out;
  }

  template <class T, class At>
  static char* Narrow(size_t count, const At& at, char* out) {
    for (size_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(at(i));
      std::memcpy(out + i * sizeof(T), &value, sizeof(T));
    }
    return Pad(out, count * sizeof(T));
  }

  // Pads an array of `size` bytes and returns where the next one begins.
  static char* Pad(char* out, size_t size) {
    const size_t padded = columnar::Padded(size);
    std::memset(out + size, 0, padded - size);
    return out + padded;
  }

  const size_t task_;
  const size_t batch_;
  const Zstd* const zstd_;
  std::string body_, frame_;
  columnar::Header header_;
  std::string schema_;
  std::vector<Field> fields_;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_COLUMNAR_ENCODER_H_
