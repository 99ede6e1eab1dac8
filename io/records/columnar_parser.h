// Parses groups in the columnar layout (columnar.h) into columns. The result is the same as that of
// example_parser.h for the same rows, one by one.
//
// There are three steps, and only the last one writes. Learn() reads the schema and finds where
// each wanted column is stored; it is skipped if the schema is that of the last record. Locate()
// walks the descriptors and finds every array, which detects anything wrong with the record. Then
// the arrays are appended to the buffers, which can't fail: a record is taken wholly or not at all,
// and there is nothing to roll back.
//
// As with an Example, unwanted stored columns are skipped. A column of one value a row may be read
// as lists of one value, and lists as single values if each has one value. The key's columns,
// stored once, are filled in for each row.

#ifndef GMETA_IO_RECORDS_COLUMNAR_PARSER_H_
#define GMETA_IO_RECORDS_COLUMNAR_PARSER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/records/column.h"
#include "io/records/columnar.h"
#include "io/records/fault.h"
#include "io/records/tfrecord.h"
#include "io/records/wire.h"
#include "io/records/zstd.h"

namespace gmeta::records {

class ColumnarParser {
 public:
  // `task` and `batch` are the places of the key's columns, each a single int64.
  ColumnarParser(std::vector<ColumnSpec> columns, size_t task, size_t batch)
      : columns_(std::move(columns)), task_(task), batch_(batch), sources_(columns_.size()) {}

  const std::vector<ColumnSpec>& columns() const { return columns_; }

  // Appends a group to `buffers` (one per column, in the constructor's order) and sets `rows` to
  // its number of rows; on a fault it changes nothing.
  ParseResult Parse(std::string_view payload, std::vector<ColumnBuffer>* buffers, int64_t* rows) {
    columnar::Header header;
    if (payload.size() < sizeof(header)) return kMalformed;
    std::memcpy(&header, payload.data(), sizeof(header));
    const columnar::Header known;
    if (std::memcmp(header.magic, known.magic, sizeof(known.magic)) != 0) return kMalformed;
    if (header.version != known.version || (header.flags & ~columnar::kZstd) != 0) {
      return {Fault::kNewerLayout, -1, header.version | int64_t{header.flags} << 16};
    }
    Walk walk{payload.data() + sizeof(header), payload.size() - sizeof(header)};
    if (header.flags & columnar::kZstd) {
      if (const ParseResult result = Decompress(&walk); result.fault != Fault::kNone) return result;
    }
    if (header.rows < 1 || static_cast<uint64_t>(header.rows) > walk.left) return kMalformed;
    const char* schema = walk.Take(header.schema);
    // A column takes a descriptor and an array, so this bounds the number of columns in the schema.
    if (schema == nullptr || header.columns > walk.left / 16) return kMalformed;
    const std::string_view spelled(schema, header.schema);
    if (!learnt_ || header.columns != stored_.size() || spelled != schema_) {
      const ParseResult result = Learn(spelled, header.columns);
      learnt_ = result.fault == Fault::kNone;
      if (!learnt_) return result;
    }
    const auto count = static_cast<size_t>(header.rows);
    if (!Locate(count, &walk)) return kMalformed;
    if (const ParseResult result = CheckSingles(count); result.fault != Fault::kNone) return result;
    for (size_t i = 0; i < columns_.size(); ++i) Fill(i, header, count, &(*buffers)[i]);
    *rows = header.rows;
    return {};
  }

 private:
  static constexpr ParseResult kMalformed{Fault::kNotColumnar, -1, 0};
  static constexpr int kTask = -1, kBatch = -2, kNowhere = -3;  // instead of a stored column

  struct Stored {
    DType dtype;
    bool is_list;
    columnar::Descriptor descriptor;  // of the current record, like the members below
    const char* lengths;
    const char* values;
  };

  // The rest of the payload.
  struct Walk {
    const char* at;
    size_t left;

    // Takes the next array of `size` bytes and its padding; returns null if fewer bytes are left.
    const char* Take(size_t size) {
      if (size > left || columnar::Padded(size) > left) return nullptr;
      const char* found = at;
      at += columnar::Padded(size);
      left -= columnar::Padded(size);
      return found;
    }
  };

  // Replaces a frame by its decompressed content.
  ParseResult Decompress(Walk* walk) {
    const Zstd* zstd = Zstd::Get();
    if (zstd == nullptr) return {Fault::kNoCodec, -1, 0};
    uint64_t size;
    if (walk->left < sizeof(size)) return kMalformed;
    std::memcpy(&size, walk->at, sizeof(size));
    if (size > columnar::kMaxBody || size / columnar::kMaxRatio > walk->left) return kMalformed;
    if (size > body_size_) {
      body_.reset(new char[size]);  // not zeroed
      body_size_ = size;
    }
    if (!zstd->Decompress(body_.get(), size, walk->at + sizeof(size), walk->left - sizeof(size))) {
      return kMalformed;
    }
    *walk = {body_.get(), size};
    return {};
  }

  ParseResult Learn(std::string_view spelled, uint32_t columns) {
    stored_.clear();
    std::unordered_map<std::string_view, int> places;
    WireReader schema(spelled);
    for (int place = kBatch; !schema.done(); ++place) {
      uint64_t kind;
      std::string_view name;
      if (!schema.ReadVarint(&kind) || kind > 3 || !schema.ReadBytes(&name)) return kMalformed;
      const bool in_key = place < 0;
      if (in_key && kind != columnar::Kind(DType::kInt64, false)) return kMalformed;
      // The key comes first, task before batch.
      const int source = place == kBatch ? kTask : place == kTask ? kBatch : place;
      if (!places.emplace(name, source).second) return kMalformed;
      if (in_key) continue;
      if (stored_.size() == columns) return kMalformed;
      stored_.push_back({kind & 1 ? DType::kFloat32 : DType::kInt64, (kind & 2) != 0, {}, {}, {}});
    }
    if (places.size() != size_t{columns} + 2) return kMalformed;

    for (size_t i = 0; i < columns_.size(); ++i) {
      const auto found = places.find(columns_[i].name);
      sources_[i] = found == places.end() ? kNowhere : found->second;
      if (sources_[i] == kNowhere) return {Fault::kMissingColumn, int(i), 0};
      const DType dtype = sources_[i] < 0 ? DType::kInt64 : stored_[sources_[i]].dtype;
      if (dtype != columns_[i].dtype) {
        return {Fault::kWrongType, int(i), dtype == DType::kFloat32 ? 2 : 3};
      }
    }
    if (sources_[task_] != kTask) return {Fault::kWrongKey, int(task_), 0};
    if (sources_[batch_] != kBatch) return {Fault::kWrongKey, int(batch_), 0};
    schema_ = spelled;
    return {};
  }

  // Finds the arrays of all stored columns. Returns whether they fill the payload exactly.
  bool Locate(size_t rows, Walk* walk) {
    const char* words = walk->Take(stored_.size() * sizeof(uint64_t));
    if (words == nullptr || (stored_.empty() && walk->Take(rows) == nullptr)) return false;
    for (Stored& column : stored_) {
      uint64_t word;
      std::memcpy(&word, words, sizeof(word));
      words += sizeof(word);
      const auto descriptor = column.descriptor = columnar::Descriptor::Of(word);
      const bool whole = descriptor.value_width == 4 ||
                         (column.dtype == DType::kInt64 &&
                          columnar::WithSigned(descriptor.value_width, [](auto) {}));
      if (!whole) return false;
      if (column.is_list) {
        if (!columnar::WithUnsigned(descriptor.length_width, [](auto) {})) return false;
        column.lengths = walk->Take(rows * descriptor.length_width);
        if (column.lengths == nullptr) return false;
      } else if (descriptor.length_width != 0 || descriptor.values != rows) {
        return false;
      }
      column.values = walk->Take(descriptor.values * descriptor.value_width);
      if (column.values == nullptr) return false;
      if (column.is_list && !LengthsAddUp(column, rows)) return false;
    }
    return walk->left == 0;
  }

  static bool LengthsAddUp(const Stored& column, size_t rows) {
    uint64_t left = column.descriptor.values;
    bool fits = true;
    columnar::WithUnsigned(column.descriptor.length_width, [&](auto zero) {
      for (size_t row = 0; row < rows && fits; ++row) {
        const uint64_t length = At<decltype(zero)>(column.lengths, row);
        fits = length <= left;
        left -= length;
      }
    });
    return fits && left == 0;
  }

  // Checks that lists wanted as single values have one value each.
  ParseResult CheckSingles(size_t rows) const {
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i].is_list || sources_[i] < 0 || !stored_[sources_[i]].is_list) continue;
      const Stored& column = stored_[sources_[i]];
      uint64_t length = 1;
      columnar::WithUnsigned(column.descriptor.length_width, [&](auto zero) {
        for (size_t row = 0; row < rows && length == 1; ++row) {
          length = At<decltype(zero)>(column.lengths, row);
        }
      });
      if (length != 1) return {Fault::kNotScalar, int(i), static_cast<int64_t>(length)};
    }
    return {};
  }

  void Fill(size_t i, const columnar::Header& header, size_t rows, ColumnBuffer* buffer) const {
    const int source = sources_[i];
    const size_t before = buffer->size(columns_[i].dtype);
    if (columns_[i].is_list) FillEnds(source, rows, before, &buffer->ends);
    if (source < 0) {
      buffer->ints.insert(buffer->ints.end(), rows, source == kTask ? header.task : header.batch);
      return;
    }
    const Stored& column = stored_[source];
    const size_t count = column.descriptor.values;
    if (count == 0) return;
    if (column.dtype == DType::kFloat32) {
      buffer->floats.resize(before + count);
      std::memcpy(buffer->floats.data() + before, column.values, count * sizeof(float));
      return;
    }
    buffer->ints.resize(before + count);
    int64_t* out = buffer->ints.data() + before;
    columnar::WithSigned(column.descriptor.value_width, [&](auto zero) {
      for (size_t k = 0; k < count; ++k) out[k] = At<decltype(zero)>(column.values, k);
    });
  }

  void FillEnds(int source, size_t rows, size_t before, std::vector<int64_t>* ends) const {
    const size_t start = ends->size();
    ends->resize(start + rows);
    int64_t* out = ends->data() + start;
    auto end = static_cast<int64_t>(before);
    if (source < 0 || !stored_[source].is_list) {
      for (size_t row = 0; row < rows; ++row) out[row] = ++end;
      return;
    }
    const Stored& column = stored_[source];
    columnar::WithUnsigned(column.descriptor.length_width, [&](auto zero) {
      for (size_t row = 0; row < rows; ++row) {
        end += static_cast<int64_t>(At<decltype(zero)>(column.lengths, row));
        out[row] = end;
      }
    });
  }

  // Reads element i. A payload may lie at any address.
  template <class T>
  static T At(const char* array, size_t i) {
    T value;
    std::memcpy(&value, array + i * sizeof(T), sizeof(T));
    return value;
  }

  std::unique_ptr<char[]> body_;  // of a compressed record
  size_t body_size_ = 0;
  const std::vector<ColumnSpec> columns_;
  const size_t task_;
  const size_t batch_;
  std::vector<int> sources_;  // for each wanted column: a place in stored_, kTask or kBatch
  std::string schema_;        // as written in the last record
  bool learnt_ = false;       // whether stored_ and sources_ belong to schema_
  std::vector<Stored> stored_;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_COLUMNAR_PARSER_H_
