// What the targets share: the columns that they read, the encoded tables that they begin with, and
// what holds of columns that a parser has filled.

#ifndef GMETA_TESTS_NATIVE_FUZZ_TABLES_H_
#define GMETA_TESTS_NATIVE_FUZZ_TABLES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/group_batch/shard_index.h"
#include "io/records/columnar_encoder.h"
#include "io/records/columnar_parser.h"
#include "io/records/example_encoder.h"
#include "io/records/example_parser.h"
#include "tests/native/check.h"
#include "tests/native/group_table.h"

namespace gmeta::fuzz {

using group_batch::Layout;
using records::ColumnBuffer;
using records::ColumnSpec;
using records::DType;

// Columns to read, and the places of the key's.
struct Wanted {
  std::vector<ColumnSpec> columns;
  size_t task;
  size_t batch;
};

// As the records of records::Sample() were written.
inline Wanted Written() { return {records::Sample().columns, 3, 1}; }

// The same columns otherwise: a single value as a list, a list as a single value, fewer of them.
inline Wanted Drifted() {
  return {{{"batch", DType::kInt64, false},
           {"rating", DType::kFloat32, true},
           {"genre", DType::kInt64, false},
           {"task", DType::kInt64, false},
           {"item", DType::kInt64, true}},
          3,
          0};
}

inline std::unique_ptr<records::RecordEncoder> Encoder(Layout layout, const Wanted& wanted) {
  if (layout == Layout::kExample) return std::make_unique<records::ExampleEncoder>(wanted.columns);
  return std::make_unique<records::ColumnarEncoder>(wanted.columns, wanted.task, wanted.batch);
}

// A parser of either layout.
class Parser {
 public:
  Parser(Layout layout, const Wanted& wanted)
      : layout_(layout),
        example_(wanted.columns),
        columnar_(wanted.columns, wanted.task, wanted.batch) {}

  records::ParseResult Parse(std::string_view payload, std::vector<ColumnBuffer>* buffers,
                             int64_t* rows) {
    if (layout_ == Layout::kColumnar) return columnar_.Parse(payload, buffers, rows);
    *rows = 1;
    return example_.Parse(payload, buffers);
  }

 private:
  const Layout layout_;
  records::ExampleParser example_;
  records::ColumnarParser columnar_;
};

// Rows, and where their groups end.
struct Groups {
  records::Table table;
  std::vector<int64_t> ends;
};

// The four groups of records::Sample(), or three others, so small that a change hits what counts.
inline Groups SampleGroups(bool second) {
  if (!second) return {records::Sample(), records::kEnds};
  records::Table table(Written().columns);
  table.Ints("task", {107, 107, 107, 7, 108, 108});
  table.Ints("batch", {0, 0, 0, 5, 1, 1});
  table.Ints("item", {1, 2, 300, 4, -5, 6});
  table.Ints("flag", {0, 1, 1, 0, 1, 0});
  table.Ints("genre", {1, 2, 3, 4}, {1, 1, 2, 3, 3, 4});
  table.Floats("rating", {1, 2, 3, 4, 5, 6});
  table.Floats("weights", {0.5f, 1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 4, 4, 6, 9});
  return {std::move(table), {3, 4, 6}};
}

// Them in a file.
inline std::string SampleFile(Layout layout, bool second, std::vector<int64_t>* bytes = nullptr,
                              std::vector<uint32_t>* crcs = nullptr) {
  const Groups groups = SampleGroups(second);
  std::string file;
  const auto encoder = Encoder(layout, Written());
  for (const std::string& payload :
       groups.table.Encode(encoder.get(), groups.ends, 1 << 20, bytes, crcs)) {
    records::AppendRecord(payload, &file);
  }
  return file;
}

// The index of that file.
inline std::string SampleIndex(Layout layout, bool second) {
  std::vector<int64_t> bytes;
  std::vector<uint32_t> crcs;
  const auto [table, ends] = SampleGroups(second);
  const Wanted wanted = Written();
  const uint64_t size = SampleFile(layout, second, &bytes, &crcs).size();
  std::string index("GIDX");
  const auto add = [&](const auto& value) {
    index.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  for (const uint32_t word : {1u, static_cast<uint32_t>(layout), 0u}) add(word);
  add(uint64_t{bytes.size()});
  add(size);
  group_batch::IndexEntry entry;
  for (size_t i = 0; i < bytes.size(); ++i) {
    entry.rows = ends[i] - entry.first_row;
    const auto row = static_cast<size_t>(entry.first_row);
    entry.key = {table.values[wanted.task].ints[row], table.values[wanted.batch].ints[row]};
    entry.crc = crcs[i];
    add(entry);
    entry.offset += bytes[i];
    entry.first_row = ends[i];
  }
  add(uint32_t{0xfeed});
  return index;
}

// So many rows of every column are there, and all lists end where they should.
inline void CheckInStep(const std::vector<ColumnSpec>& columns,
                        const std::vector<ColumnBuffer>& buffers, int64_t rows) {
  for (size_t i = 0; i < columns.size(); ++i) {
    const ColumnBuffer& buffer = buffers[i];
    const auto size = static_cast<int64_t>(buffer.size(columns[i].dtype));
    CHECK((columns[i].dtype == DType::kInt64 ? buffer.floats.size() : buffer.ints.size()) == 0);
    if (!columns[i].is_list) {
      CHECK_EQ(size, rows);
      CHECK(buffer.ends.empty());
      continue;
    }
    CHECK_EQ(static_cast<int64_t>(buffer.ends.size()), rows);
    int64_t before = 0;
    for (const int64_t end : buffer.ends) {
      CHECK(before <= end);
      before = end;
    }
    CHECK_EQ(before, size);
  }
}

// All rows from `begin` to `end` - 1 are of this key.
inline void CheckKey(const Wanted& wanted, const std::vector<ColumnBuffer>& buffers, int64_t begin,
                     int64_t end, const group_batch::GroupKey& key) {
  for (auto row = static_cast<size_t>(begin); row < static_cast<size_t>(end); ++row) {
    CHECK_EQ(buffers[wanted.task].ints[row], key.task);
    CHECK_EQ(buffers[wanted.batch].ints[row], key.batch);
  }
}

// A message is one line that names the file.
inline void CheckMessage(const group_batch::Problem& problem) {
  CHECK(problem.fault != records::Fault::kNone);
  CHECK(problem.skipped >= 0);
  CHECK(problem.message.find('\n') == std::string::npos);
  CHECK(problem.message.size() < 600 && problem.message.find(": ") != std::string::npos);
}

}  // namespace gmeta::fuzz

#endif  // GMETA_TESTS_NATIVE_FUZZ_TABLES_H_
