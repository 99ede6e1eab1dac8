// A file of records, walked, each payload parsed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/records/tfrecord.h"
#include "tests/native/check.h"
#include "tests/native/fuzz/tables.h"
#include "tests/native/fuzz/target.h"

namespace gmeta::fuzz {
namespace {

using records::Fault;
using records::ParseResult;

// A parser makes at most so many bytes of one byte, in each column.
constexpr size_t kGrowth = 16;

struct Record {
  Fault fault;
  std::string_view payload;
};

// By TakeRecord, up to where the way is lost.
std::vector<Record> Walk(const std::string& file) {
  std::vector<Record> found;
  for (std::string_view left = file; !left.empty();) {
    const uint64_t offset = file.size() - left.size();
    std::string_view payload;
    uint64_t length = 0;
    const Fault fault = records::TakeRecord(&left, &payload, &length);
    const bool lost = fault == Fault::kTruncated || fault == Fault::kLengthCrc;
    found.push_back({fault, fault == Fault::kNone ? payload : std::string_view()});
    if (lost) break;
    CHECK(left.size() < file.size() - offset);
  }
  return found;
}

size_t BytesOf(const ColumnBuffer& buffer) {
  return 8 * buffer.ints.size() + 4 * buffer.floats.size() + 8 * buffer.ends.size();
}

// Rows that were read, encoded and read again are the same.
void CheckRoundTrip(Layout layout, const Wanted& wanted, const std::vector<ColumnBuffer>& buffers,
                    int64_t rows) {
  records::Table table(wanted.columns);
  table.values = buffers;
  const auto encoder = Encoder(layout, wanted);
  Parser parser(layout, wanted);
  std::vector<ColumnBuffer> again(buffers.size());
  for (const std::string& payload : table.Encode(encoder.get(), {rows})) {
    int64_t found;
    CHECK_EQ(int(parser.Parse(payload, &again, &found).fault), int(Fault::kNone));
  }
  CHECK(records::Same(again, buffers));
}

class RecordsTarget : public Target {
 public:
  explicit RecordsTarget(Layout layout) : layout_(layout) {}

  std::string name() const override {
    return layout_ == Layout::kExample ? "example-records" : "columnar-records";
  }

  size_t growth() const override { return layout_ == Layout::kColumnar ? kCompressed : kPlain; }

  std::vector<Input> Seeds() const override {
    const std::string file = SampleFile(layout_, false);
    const std::string small = SampleFile(layout_, true);
    std::vector<Input> seeds = {{file}, {small}, {file + small}, {file.substr(0, 100)}, {""}};
    if (layout_ == Layout::kColumnar && records::Zstd::Get() != nullptr) {
      const auto [table, ends] = SampleGroups(true);
      const Wanted wanted = Written();
      records::ColumnarEncoder encoder(wanted.columns, wanted.task, wanted.batch,
                                       records::Zstd::Get());
      seeds.emplace_back(1);
      for (const std::string& payload : table.Encode(&encoder, ends)) {
        records::AppendRecord(payload, &seeds.back()[0]);
      }
    }
    return seeds;
  }

  void Run(const Input& input) override {
    const std::vector<Record> found = Walk(input[0]);
    for (const Wanted& wanted : {Written(), Drifted()}) {
      Parser parser(layout_, wanted);
      std::vector<ColumnBuffer> buffers(wanted.columns.size());
      int64_t rows = 0;
      for (const Record& record : found) {
        if (record.fault == Fault::kNone) Parse(record.payload, wanted, &parser, &buffers, &rows);
      }
      CheckInStep(wanted.columns, buffers, rows);
    }
  }

 private:
  void Parse(std::string_view payload, const Wanted& wanted, Parser* parser,
             std::vector<ColumnBuffer>* buffers, int64_t* rows) const {
    // In a block of its own size, so that the sanitizer sees a step beyond its end.
    const std::vector<char> exact(payload.begin(), payload.end());
    const std::vector<ColumnBuffer> before = *buffers;
    int64_t found = 0;
    const ParseResult result = parser->Parse({exact.data(), exact.size()}, buffers, &found);

    // What a parser has learnt from other records makes no difference.
    std::vector<ColumnBuffer> alone(buffers->size());
    int64_t found_alone = 0;
    const ParseResult fresh =
        Parser(layout_, wanted).Parse({exact.data(), exact.size()}, &alone, &found_alone);
    CHECK_EQ(int(fresh.fault), int(result.fault));
    CHECK_EQ(fresh.column, result.column);
    CHECK_EQ(fresh.found, result.found);
    if (result.fault != Fault::kNone) {
      CHECK(records::Same(*buffers, before));
      return;
    }
    CHECK_EQ(found, found_alone);
    CHECK(found >= 1);
    *rows += found;
    CheckInStep(wanted.columns, alone, found);
    uint64_t body = payload.size();
    if (layout_ == Layout::kColumnar && payload[6] == records::columnar::kZstd) {
      std::memcpy(&body, payload.data() + sizeof(records::columnar::Header), sizeof(body));
      CHECK(body / records::columnar::kMaxRatio <= payload.size());
      body += sizeof(records::columnar::Header);
    }
    for (size_t i = 0; i < alone.size(); ++i) {
      CHECK(BytesOf(alone[i]) <= kGrowth * body);
      const DType dtype = wanted.columns[i].dtype;
      CHECK_EQ((*buffers)[i].size(dtype), before[i].size(dtype) + alone[i].size(dtype));
      for (size_t k = 0; k < alone[i].ints.size(); ++k) {
        CHECK_EQ((*buffers)[i].ints[before[i].ints.size() + k], alone[i].ints[k]);
      }
    }
    CheckRoundTrip(layout_, wanted, alone, found);
  }

  const Layout layout_;
};

// A step beyond a payload's end, behind a checksum, a length and a number of eight bytes.
class PlantedTarget : public Target {
 public:
  std::string name() const override { return "planted"; }
  std::vector<Input> Seeds() const override { return {{SampleFile(Layout::kExample, false)}}; }

  void Run(const Input& input) override {
    for (const Record& record : Walk(input[0])) {
      const std::vector<char> exact(record.payload.begin(), record.payload.end());
      uint64_t number;
      if (exact.size() < 100 || exact.size() > 120) continue;
      std::memcpy(&number, exact.data() + 20, sizeof(number));
      if (number != 0x51c7e5d1ab1e5eedu) continue;
      volatile char beyond = exact.data()[exact.size() + static_cast<size_t>(exact[1] & 1)];
      (void)beyond;
    }
  }
};

}  // namespace

std::vector<std::unique_ptr<Target>> RecordTargets() {
  std::vector<std::unique_ptr<Target>> targets;
  targets.push_back(std::make_unique<RecordsTarget>(Layout::kExample));
  targets.push_back(std::make_unique<RecordsTarget>(Layout::kColumnar));
  return targets;
}

std::vector<std::unique_ptr<Target>> PlantedTargets() {
  std::vector<std::unique_ptr<Target>> targets;
  targets.push_back(std::make_unique<PlantedTarget>());
  return targets;
}

}  // namespace gmeta::fuzz
