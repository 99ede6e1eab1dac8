// The columnar layout: what its encoder writes, and what its parser makes of that.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "io/records/columnar_encoder.h"
#include "io/records/columnar_parser.h"
#include "io/records/example_encoder.h"
#include "io/records/example_parser.h"
#include "tests/native/check.h"
#include "tests/native/group_table.h"

namespace gmeta::records {
namespace {

void TestBothLayoutsGiveTheSameColumns() {
  const Table table = Sample();
  ColumnarEncoder columnar(table.columns, 3, 1);
  ExampleEncoder example(table.columns);
  ColumnarParser columnar_parser(table.columns, 3, 1);
  ExampleParser example_parser(table.columns);
  for (size_t limit : {size_t{1}, size_t{900}, size_t{1} << 20}) {
    std::vector<ColumnBuffer> from_groups(7), from_rows(7);
    const std::vector<std::string> groups = table.Encode(&columnar, kEnds, limit);
    CHECK_EQ(groups.size(), kEnds.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      int64_t rows = 0;
      CHECK(Parse(&columnar_parser, groups[i], &from_groups, &rows).fault == Fault::kNone);
      CHECK_EQ(rows, kEnds[i] - (i == 0 ? 0 : kEnds[i - 1]));
    }
    for (const std::string& payload : table.Encode(&example, kEnds, limit)) {
      CHECK(example_parser.Parse(payload, &from_rows).fault == Fault::kNone);
    }
    CHECK(Same(from_groups, table.values));
    CHECK(Same(from_rows, table.values));
  }
}

void TestGroupsAreMeasured() {
  const Table table = Sample();
  ColumnarEncoder columnar(table.columns, 3, 1);
  ExampleEncoder example(table.columns);
  for (RecordEncoder* encoder :
       {static_cast<RecordEncoder*>(&columnar), static_cast<RecordEncoder*>(&example)}) {
    for (size_t limit : {size_t{1}, size_t{900}, size_t{1} << 20}) {
      std::vector<int64_t> bytes;
      std::vector<uint32_t> crcs;
      const std::vector<std::string> payloads = table.Encode(encoder, kEnds, limit, &bytes, &crcs);
      size_t next = 0;
      for (size_t g = 0; g < kEnds.size(); ++g) {
        const int64_t rows = kEnds[g] - (g == 0 ? 0 : kEnds[g - 1]);
        std::string joined;
        const int64_t records = encoder == &columnar ? 1 : rows;
        for (int64_t i = 0; i < records; ++i) joined += payloads[next++];
        CHECK_EQ(bytes[g], static_cast<int64_t>(joined.size()) + 16 * records);
        CHECK_EQ(crcs[g], Crc32c(joined.data(), joined.size()));
      }
      CHECK_EQ(next, payloads.size());
    }
  }
}

void TestTheBytesAreThoseOfTheDescription() {
  Table table(
      {{"z", kFloat, true}, {"task", kInt, false}, {"a", kInt, false}, {"batch", kInt, false}});
  table.Ints("task", {-2, -2});
  table.Ints("batch", {3, 3});
  table.Ints("a", {1, 300});
  table.Floats("z", {0.5f}, {0, 1});
  const auto number = [](uint64_t value, size_t size) {
    return std::string(reinterpret_cast<const char*>(&value), size);
  };
  const std::string schema = std::string("\0\4task\0\5batch\0\1a\3\1z", 19);
  const std::string expected = "GCOL" + number(1, 2) + number(0, 2) + number(2, 4) + number(19, 4) +
                               number(2, 8) + number(uint64_t(-2), 8) + number(3, 8) + schema +
                               std::string(5, '\0') + number(2 << 16 | 2, 8) +
                               number(1 << 16 | 1 << 8 | 4, 8) +                       //
                               number(1, 2) + number(300, 2) + std::string(4, '\0') +  // a
                               number(0, 1) + number(1, 1) + std::string(6, '\0') +
                               number(0x3f000000, 4) + std::string(4, '\0');
  CHECK(table.Columnar({2})[0] == expected);

  // The order of the schema makes no difference, nor does what the encoder wrote before.
  Table other(
      {{"batch", kInt, false}, {"a", kInt, false}, {"task", kInt, false}, {"z", kFloat, true}});
  other.Ints("task", {9, -2, -2});
  other.Ints("batch", {9, 3, 3});
  other.Ints("a", {-1, 1, 300});
  other.Floats("z", std::vector<float>(40, -1.0f), {39, 39, 40});
  other.values[3].floats[39] = 0.5f;
  CHECK(other.Columnar({1, 3})[1] == expected);
}

void TestWidths() {
  const std::vector<std::pair<int64_t, uint8_t>> cases = {
      {0, 1},           {127, 1},        {-128, 1},        {128, 2},       {-129, 2},
      {32767, 2},       {-32768, 2},     {32768, 4},       {-32769, 4},    {2147483647, 4},
      {-2147483648, 4}, {2147483648, 8}, {-2147483649, 8}, {INT64_MAX, 8}, {INT64_MIN, 8}};
  for (const auto& [value, width] : cases) {
    Table table({{"task", kInt, false}, {"batch", kInt, false}, {"a", kInt, false}});
    table.Ints("task", std::vector<int64_t>(19, 1));
    table.Ints("batch", std::vector<int64_t>(19, 1));
    std::vector<int64_t> values(19, 0);
    values[13] = value;
    table.Ints("a", values);
    const std::string payload = table.Columnar({19})[0];
    CHECK_EQ(payload.size(), 40 + 16 + 8 + columnar::Padded(19 * width));  // a schema of 16 bytes
    ColumnarParser parser(table.columns, 0, 1);
    std::vector<ColumnBuffer> buffers(3);
    int64_t rows;
    CHECK(Parse(&parser, payload, &buffers, &rows).fault == Fault::kNone);
    CHECK(Same(buffers, table.values));
  }
}

void TestAKeyAloneTakesAByteARow() {
  Table table({{"task", kInt, false}, {"batch", kInt, false}});
  table.Ints("task", std::vector<int64_t>(21, 5));
  table.Ints("batch", std::vector<int64_t>(21, 6));
  const std::string payload = table.Columnar({21})[0];
  ColumnarParser parser(table.columns, 0, 1);
  std::vector<ColumnBuffer> buffers(2);
  int64_t rows;
  CHECK(Parse(&parser, payload, &buffers, &rows).fault == Fault::kNone);
  CHECK(Same(buffers, table.values));
}

void TestOtherSchemas() {
  const Table table = Sample();
  const std::vector<std::string> payloads = table.Columnar(kEnds);
  const auto check = [&](std::vector<ColumnSpec> columns, Fault fault, int column, int64_t found) {
    columns.insert(columns.begin(), {{"task", kInt, false}, {"batch", kInt, false}});
    ColumnarParser parser(columns, 0, 1);
    std::vector<ColumnBuffer> buffers(columns.size());
    int64_t rows;
    const ParseResult result = Parse(&parser, payloads[3], &buffers, &rows);
    CHECK(result.fault == fault);
    CHECK_EQ(result.column, column);
    CHECK_EQ(result.found, found);
    if (fault != Fault::kNone) CHECK(Same(buffers, std::vector<ColumnBuffer>(columns.size())));
    return buffers;
  };
  check({{"flag", kInt, false}, {"missing", kInt, false}}, Fault::kMissingColumn, 3, 0);
  check({{"flag", kFloat, false}}, Fault::kWrongType, 2, 3);
  check({{"rating", kInt, false}}, Fault::kWrongType, 2, 2);
  check({{"genre", kInt, false}}, Fault::kNotScalar, 2, 0);
  // A part of the columns, in another order; one value a row as a list of one.
  std::vector<ColumnBuffer> some = check({{"item", kInt, true}}, Fault::kNone, -1, 0);
  CHECK((some[2].ints ==
         std::vector<int64_t>{std::numeric_limits<int64_t>::min(), 2, 3, 4, 5, 6, 7, 8, 9}));
  CHECK((some[2].ends == std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  // Lists of one value as single values.
  ColumnarParser singles(
      {{"weights", kFloat, false}, {"task", kInt, false}, {"batch", kInt, false}}, 1, 2);
  std::vector<ColumnBuffer> buffers(3);
  int64_t rows;
  CHECK(Parse(&singles, payloads[2], &buffers, &rows).fault == Fault::kNone);
  CHECK((buffers[0].floats == std::vector<float>{0.25f, 0.25f}));
  CHECK(buffers[0].ends.empty());
  // Groups of another key.
  const std::vector<ColumnSpec> keys = {
      {"item", kInt, false}, {"task", kInt, false}, {"batch", kInt, false}};
  ColumnarParser other(keys, 0, 2), swapped(keys, 2, 1);
  CHECK(Parse(&other, payloads[0], &buffers, &rows).fault == Fault::kWrongKey);
  CHECK(Parse(&swapped, payloads[0], &buffers, &rows).fault == Fault::kWrongKey);
  CHECK_EQ(buffers[0].floats.size(), 2u);

  // A file may change its schema in the middle: each record is read by its own.
  Table narrow({{"task", kInt, false}, {"batch", kInt, false}, {"item", kInt, false}});
  narrow.Ints("task", {1});
  narrow.Ints("batch", {2});
  narrow.Ints("item", {3});
  const std::string small = narrow.Columnar({1})[0];
  ColumnarParser parser(narrow.columns, 0, 1);
  std::vector<ColumnBuffer> all(3);
  for (const std::string& payload : {payloads[1], small, payloads[1], std::string("?"), small}) {
    Parse(&parser, payload, &all, &rows);
  }
  CHECK((all[2].ints == std::vector<int64_t>{127, -128, 5, 3, 127, -128, 5, 3}));
  CHECK((all[0].ints == std::vector<int64_t>{7, 7, 7, 1, 7, 7, 7, 1}));
}

void TestForeignPayloads() {
  const Table table = Sample();
  std::string payload = table.Columnar(kEnds)[1];
  ColumnarParser parser(table.columns, 3, 1);
  ExampleParser example_parser(table.columns);
  ExampleEncoder example(table.columns);
  std::vector<ColumnBuffer> buffers(7);
  int64_t rows;
  CHECK(example_parser.Parse(payload, &buffers).fault == Fault::kNotExample);
  for (const std::string& other : table.Encode(&example, kEnds)) {
    CHECK(Parse(&parser, other, &buffers, &rows).fault == Fault::kNotColumnar);
  }
  payload[4] = 2;
  ParseResult result = Parse(&parser, payload, &buffers, &rows);
  CHECK(result.fault == Fault::kNewerLayout);
  CHECK_EQ(result.found, 2);
  payload[4] = 1;
  payload[6] = 2;
  result = Parse(&parser, payload, &buffers, &rows);
  CHECK(result.fault == Fault::kNewerLayout);
  CHECK_EQ(result.found, 131073);
  payload[6] = 1;  // what follows is no frame
  const Fault fault = Zstd::Get() == nullptr ? Fault::kNoCodec : Fault::kNotColumnar;
  CHECK(Parse(&parser, payload, &buffers, &rows).fault == fault);
  CHECK(Same(buffers, std::vector<ColumnBuffer>(7)));
}

// Compressed or not, a group is the same; damage to a frame is a fault, or makes no difference, and
// leaves the buffers as they were.
void TestCompressedGroups() {
  if (Zstd::Get() == nullptr) return;
  Table table({{"task", kInt, false}, {"batch", kInt, false}, {"item", kInt, false}});
  table.Ints("task", std::vector<int64_t>(200, 7));
  table.Ints("batch", std::vector<int64_t>(200, 1));
  std::vector<int64_t> items;
  for (int64_t i = 0; i < 200; ++i) items.push_back(1000 + i / 3);
  table.Ints("item", items);
  ColumnarEncoder plain(table.columns, 0, 1), packed(table.columns, 0, 1, Zstd::Get());
  const std::string expected = table.Encode(&plain, {200})[0];
  const std::string payload = table.Encode(&packed, {200})[0];
  CHECK(payload.size() < expected.size() / 2);
  ColumnarParser parser(table.columns, 0, 1);
  std::vector<ColumnBuffer> buffers(3);
  int64_t rows = 0;
  CHECK(Parse(&parser, payload, &buffers, &rows).fault == Fault::kNone);
  CHECK_EQ(rows, 200);
  CHECK(Same(buffers, table.values));
  for (size_t at = 0; at < payload.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = payload;
      damaged[at] = static_cast<char>(damaged[at] ^ 1 << bit);
      std::vector<ColumnBuffer> fresh(3);
      if (Parse(&parser, damaged, &fresh, &rows).fault != Fault::kNone) {
        CHECK(Same(fresh, std::vector<ColumnBuffer>(3)));
      }
    }
    std::vector<ColumnBuffer> fresh(3);
    CHECK(Parse(&parser, payload.substr(0, at), &fresh, &rows).fault == Fault::kNotColumnar);
  }
}

// As std::vector has it, an array without a value may be at no address.
void TestListsWithoutAnyValue() {
  Table table({{"weights", kFloat, true},
               {"genre", kInt, true},
               {"task", kInt, false},
               {"batch", kInt, false}});
  table.Ints("task", {1, 1});
  table.Ints("batch", {2, 2});
  table.Ints("genre", {}, {0, 0});
  table.Floats("weights", {}, {0, 0});
  ColumnarParser parser(table.columns, 2, 3);
  std::vector<ColumnBuffer> buffers(4);
  int64_t rows;
  CHECK(Parse(&parser, table.Columnar({2})[0], &buffers, &rows).fault == Fault::kNone);
  CHECK(Same(buffers, table.values));
}

}  // namespace
}  // namespace gmeta::records

int main() {
  gmeta::records::TestCompressedGroups();
  using namespace gmeta::records;
  TestBothLayoutsGiveTheSameColumns();
  TestGroupsAreMeasured();
  TestTheBytesAreThoseOfTheDescription();
  TestWidths();
  TestAKeyAloneTakesAByteARow();
  TestOtherSchemas();
  TestForeignPayloads();
  TestListsWithoutAnyValue();
}
