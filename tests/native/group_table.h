// A table of groups in memory, for tests of the layouts that hold groups.

#ifndef GMETA_TESTS_NATIVE_GROUP_TABLE_H_
#define GMETA_TESTS_NATIVE_GROUP_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/records/column.h"
#include "io/records/columnar_encoder.h"
#include "io/records/columnar_parser.h"
#include "io/records/record_encoder.h"
#include "io/records/tfrecord.h"
#include "tests/native/check.h"

namespace gmeta::records {

inline constexpr DType kInt = DType::kInt64;
inline constexpr DType kFloat = DType::kFloat32;

// Rows of a table, to be encoded in either layout.
class Table {
 public:
  explicit Table(std::vector<ColumnSpec> columns) : columns(std::move(columns)) {
    values.resize(this->columns.size());
  }

  void Ints(const std::string& name, std::vector<int64_t> ints, std::vector<int64_t> ends = {}) {
    values[Place(name)] = {std::move(ints), {}, std::move(ends)};
  }
  void Floats(const std::string& name, std::vector<float> floats, std::vector<int64_t> ends = {}) {
    values[Place(name)] = {{}, std::move(floats), std::move(ends)};
  }

  size_t Place(const std::string& name) const {
    size_t place = 0;
    while (columns[place].name != name) ++place;
    return place;
  }

  std::vector<std::string> Encode(RecordEncoder* encoder, const std::vector<int64_t>& ends,
                                  size_t limit = 1 << 20, std::vector<int64_t>* bytes = nullptr,
                                  std::vector<uint32_t>* crcs = nullptr) const {
    std::vector<std::vector<int64_t>> splits(columns.size());
    std::vector<ColumnView> views;
    for (size_t i = 0; i < columns.size(); ++i) {
      splits[i] = {0};
      splits[i].insert(splits[i].end(), values[i].ends.begin(), values[i].ends.end());
      const void* data = values[i].ints.data();
      if (columns[i].dtype == kFloat) data = values[i].floats.data();
      views.push_back({data, columns[i].is_list ? splits[i].data() : nullptr});
    }
    if (bytes != nullptr) bytes->assign(ends.size(), 0);
    if (crcs != nullptr) crcs->assign(ends.size(), 0);
    const GroupRuns runs = {ends.data(), static_cast<int64_t>(ends.size()),
                            bytes != nullptr ? bytes->data() : nullptr,
                            crcs != nullptr ? crcs->data() : nullptr};
    std::string file;
    for (int64_t row = 0; row < ends.back();) {
      const int64_t next = encoder->Encode(views.data(), row, runs, limit);
      CHECK(next > row);
      row = next;
      file.append(encoder->data(), encoder->size());
    }
    std::vector<std::string> payloads;
    std::string_view payload;
    uint64_t length;
    for (std::string_view left = file; !left.empty();) {
      CHECK(TakeRecord(&left, &payload, &length) == Fault::kNone);
      payloads.emplace_back(payload);
    }
    return payloads;
  }

  std::vector<std::string> Columnar(const std::vector<int64_t>& ends) const {
    ColumnarEncoder encoder(columns, Place("task"), Place("batch"));
    return Encode(&encoder, ends);
  }

  std::vector<ColumnSpec> columns;
  std::vector<ColumnBuffer> values;
};

inline bool Same(const std::vector<ColumnBuffer>& a, const std::vector<ColumnBuffer>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].ints != b[i].ints || a[i].ends != b[i].ends) return false;
    if (a[i].floats.size() != b[i].floats.size()) return false;
    // By bits: NaNs of any payload and both zeros come back.
    if (!a[i].floats.empty() && std::memcmp(a[i].floats.data(), b[i].floats.data(),
                                            a[i].floats.size() * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

// Four groups of 1, 3, 2 and 9 rows, of every kind of column.
inline Table Sample() {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  Table t({{"rating", kFloat, false},
           {"batch", kInt, false},
           {"genre", kInt, true},
           {"task", kInt, false},
           {"item", kInt, false},
           {"weights", kFloat, true},
           {"flag", kInt, false}});
  t.Ints("task", {kMin, 7, 7, 7, -7, -7, 8, 8, 8, 8, 8, 8, 8, 8, 8});
  t.Ints("batch", {kMax, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  t.Ints("item", {kMax, 127, -128, 5, 128, 0, kMin, 2, 3, 4, 5, 6, 7, 8, 9});
  t.Ints("flag", {0, 1, 0, 1, -32768, 32767, 1 << 20, 0, 0, 0, 0, 0, 0, 0, -(1 << 30)});
  t.Ints("genre", {1, 2, 3, 70000, 5, 6, -7}, {0, 3, 3, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 7, 7});
  std::vector<float> ratings = {0, -0.0f, 3.5f, 1e-40f, 1e38f, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7};
  ratings[4] = std::numeric_limits<float>::quiet_NaN();
  t.Floats("rating", ratings);
  t.Floats("weights", std::vector<float>(700, 0.25f),
           {300, 300, 300, 300, 301, 302, 302, 302, 302, 302, 302, 302, 302, 302, 700});
  return t;
}
inline const std::vector<int64_t> kEnds = {1, 4, 6, 15};

inline ParseResult Parse(ColumnarParser* parser, const std::string& payload,
                         std::vector<ColumnBuffer>* buffers, int64_t* rows) {
  // In a block of its own size, so that the sanitizer sees a step beyond its end.
  const std::vector<char> exact(payload.begin(), payload.end());
  return parser->Parse({exact.data(), exact.size()}, buffers, rows);
}

}  // namespace gmeta::records

#endif  // GMETA_TESTS_NATIVE_GROUP_TABLE_H_
