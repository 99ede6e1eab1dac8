// CRC-32C, TFRecord framing, and the encoder and parser of tf.train.Example.

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/records/example_encoder.h"
#include "io/records/example_parser.h"
#include "io/records/tfrecord.h"
#include "ops/common/crc32c.h"
#include "tests/native/check.h"

namespace gmeta::records {
namespace {

// What is found in a file: payloads, and faults with their offsets.
struct Seen {
  std::vector<std::string> payloads;
  std::vector<std::pair<Fault, uint64_t>> faults;
};

Seen ReadAll(const std::string& file) {
  Seen seen;
  std::string_view payload;
  uint64_t length;
  for (std::string_view left = file; !left.empty();) {
    const uint64_t offset = file.size() - left.size();
    const Fault fault = TakeRecord(&left, &payload, &length);
    if (fault == Fault::kNone) {
      seen.payloads.emplace_back(payload);
    } else {
      seen.faults.emplace_back(fault, offset);
    }
    if (fault == Fault::kTruncated || fault == Fault::kLengthCrc) break;
  }
  return seen;
}

std::string Join(const std::vector<std::string>& payloads) {
  std::string file;
  for (const std::string& payload : payloads) AppendRecord(payload, &file);
  return file;
}

void TestCrcOfKnownMessages() {
  // RFC 3720, B.4, and the customary check value.
  CHECK_EQ(Crc32c("123456789", 9), 0xe3069283u);
  CHECK_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8a9136aau);
  CHECK_EQ(Crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  CHECK_EQ(Crc32c("", 0), 0u);
  CHECK_EQ(crc32c_internal::Crc32cPortable("123456789", 9), 0xe3069283u);
}

void TestCrcPathsAgree() {
  std::mt19937 random(1);
  std::string bytes(400, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  for (size_t start = 0; start < 9; ++start) {
    for (size_t size = 0; start + size <= bytes.size(); ++size) {
      const uint32_t crc = Crc32c(bytes.data() + start, size);
      CHECK_EQ(crc, crc32c_internal::Crc32cPortable(bytes.data() + start, size));
      // In two pieces.
      const char* middle = bytes.data() + start + size / 3;
      const uint32_t before = Crc32c(bytes.data() + start, size / 3);
      CHECK_EQ(crc, Crc32c(middle, size - size / 3, before));
      CHECK_EQ(crc, crc32c_internal::Crc32cPortable(middle, size - size / 3, before));
    }
  }
}

void TestRecordsOfAnySize() {
  std::vector<std::string> payloads;
  for (size_t size : {0, 1, 7, 200, 3, 1000, 0, 15, 16, 17}) {
    payloads.push_back(std::string(size, static_cast<char>('a' + payloads.size())));
  }
  const Seen seen = ReadAll(Join(payloads));
  CHECK(seen.payloads == payloads);
  CHECK(seen.faults.empty());
}

void TestCutAtEveryByte() {
  const std::vector<std::string> payloads = {"first", "", "the third one"};
  const std::string file = Join(payloads);
  std::vector<size_t> seams = {0};
  for (const std::string& payload : payloads) seams.push_back(seams.back() + 16 + payload.size());
  for (size_t cut = 0; cut <= file.size(); ++cut) {
    size_t whole = 0;
    while (whole < payloads.size() && seams[whole + 1] <= cut) ++whole;
    const Seen seen = ReadAll(file.substr(0, cut));
    CHECK_EQ(seen.payloads.size(), whole);
    if (cut == seams[whole]) {
      CHECK(seen.faults.empty());
    } else {
      CHECK_EQ(seen.faults.size(), 1u);
      CHECK(seen.faults[0] == std::make_pair(Fault::kTruncated, uint64_t{seams[whole]}));
    }
  }
}

void TestEveryFlippedBitIsNoticed() {
  const std::vector<std::string> payloads = {"first", "second", "third"};
  const std::string file = Join(payloads);
  const size_t start = 16 + payloads[0].size();  // of the second record
  const size_t size = 16 + payloads[1].size();
  for (size_t byte = start; byte < start + size; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = file;
      bad[byte] = static_cast<char>(bad[byte] ^ (1 << bit));
      const Seen seen = ReadAll(bad);
      const bool in_length = byte < start + kHeaderBytes;
      CHECK_EQ(seen.faults.size(), 1u);
      CHECK(seen.faults[0] ==
            std::make_pair(in_length ? Fault::kLengthCrc : Fault::kDataCrc, uint64_t{start}));
      CHECK(seen.payloads == (in_length ? std::vector<std::string>{"first"}
                                        : std::vector<std::string>{"first", "third"}));
    }
  }
}

void TestLengthsBeyondTheEnd() {
  // A sound checksum over a length of 2 GB, and over one that wraps round when the frame is added.
  for (const uint64_t length : {uint64_t{2} << 30, UINT64_MAX - 3}) {
    std::string file = Join({"first"});
    const size_t start = file.size();
    file.resize(start + kHeaderBytes);
    WriteHeader(file.data() + start, length);
    const Seen seen = ReadAll(file + "and so on");
    CHECK(seen.payloads == std::vector<std::string>{"first"});
    CHECK(seen.faults[0] == std::make_pair(Fault::kTruncated, uint64_t{start}));
  }
}

const std::vector<ColumnSpec> kColumns = {{"task", DType::kInt64, false},
                                          {"genre", DType::kInt64, true},
                                          {"rating", DType::kFloat32, false},
                                          {"weights", DType::kFloat32, true}};

ParseResult Parse(const std::string& payload, std::vector<ColumnBuffer>* buffers,
                  const std::vector<ColumnSpec>& columns = kColumns) {
  ExampleParser parser(columns);
  buffers->assign(columns.size(), {});
  return parser.Parse(payload, buffers);
}

void TestWhatIsEncodedIsParsed() {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> task = {0, -1, kMax, kMin, 127, 128, 1 << 21};
  const std::vector<int64_t> genre = {1, 2, 3, kMin, 300};
  const std::vector<int64_t> genre_splits = {0, 0, 3, 3, 4, 5, 5, 5};
  const std::vector<float> rating = {0, -0.0f, 3.5f, 1e-40f, 1e38f, 7, 8};
  std::vector<float> weights(1000, 0.25f);
  const std::vector<int64_t> weight_splits = {0, 500, 500, 501, 501, 501, 999, 1000};
  const ColumnView views[] = {{task.data(), nullptr},
                              {genre.data(), genre_splits.data()},
                              {rating.data(), nullptr},
                              {weights.data(), weight_splits.data()}};
  for (size_t limit : {size_t{1}, size_t{2500}, size_t{1} << 20}) {
    ExampleEncoder encoder(kColumns);
    ExampleParser parser(kColumns);
    std::vector<ColumnBuffer> buffers(kColumns.size());
    for (int64_t row = 0; row < 7;) {
      const int64_t end = 7;
      const int64_t next = encoder.Encode(views, row, {&end, 1}, limit);
      CHECK(next > row);
      row = next;
      const Seen seen = ReadAll(std::string(encoder.data(), encoder.size()));
      CHECK(seen.faults.empty());
      for (const std::string& payload : seen.payloads) {
        CHECK(parser.Parse(payload, &buffers).fault == Fault::kNone);
      }
    }
    CHECK(buffers[0].ints == task);
    CHECK(buffers[1].ints == genre);
    CHECK(buffers[1].ends == std::vector<int64_t>(genre_splits.begin() + 1, genre_splits.end()));
    CHECK(buffers[2].floats == rating);
    CHECK(buffers[3].floats == weights);
    CHECK(buffers[3].ends == std::vector<int64_t>(weight_splits.begin() + 1, weight_splits.end()));
  }
}

// Messages built by hand, in every form that the wire format allows.
std::string Field(uint32_t number, const std::string& bytes) {
  char size[10];
  return Tag(number, kBytes) + std::string(size, WriteVarint(size, bytes.size())) + bytes;
}
std::string Entry(const std::string& name, const std::string& feature) {
  return Field(1, Field(1, name) + Field(2, feature));
}
std::string Example(const std::string& entries) { return Field(1, entries); }
std::string Ints(const std::string& packed) { return Field(3, Field(1, packed)); }
std::string Floats(const std::string& packed) { return Field(2, Field(1, packed)); }
const std::string kHalf("\0\0\0\x3f", 4);
// The other columns of kColumns, well-formed.
const std::string kRest =
    Entry("genre", Ints("\x01")) + Entry("rating", Floats(kHalf)) + Entry("weights", Floats(""));

void TestFormsOfTheWire() {
  std::vector<ColumnBuffer> buffers;
  // Unpacked lists, in pieces, beside a packed one; unknown fields at every level.
  const std::string unknown = std::string("\x48\x05", 2) + Field(12, "?") + std::string("\x51", 1) +
                              std::string(8, 'x') + std::string("\x5d", 1) + std::string(4, 'x');
  std::string genre = Field(3, std::string("\x08\x05\x08\x96\x01", 5) + unknown) + unknown +
                      Field(3, Field(1, "\x07\x08"));
  std::string weights = Field(2, "\x0d" + kHalf + "\x0d" + kHalf + Field(1, kHalf) + unknown);
  std::string payload =
      unknown + Field(1, Entry("stranger", Ints("\x01")) + unknown + Entry("task", Ints("\x09"))) +
      Field(1, Entry("rating", Floats(kHalf)) + Entry("genre", genre) + Entry("weights", weights)) +
      unknown;
  CHECK(Parse(payload, &buffers).fault == Fault::kNone);
  CHECK(buffers[0].ints == std::vector<int64_t>{9});
  CHECK((buffers[1].ints == std::vector<int64_t>{5, 150, 7, 8}));
  CHECK((buffers[3].floats == std::vector<float>{0.5f, 0.5f, 0.5f}));

  // A name given twice, a oneof set twice: the last one counts.
  CHECK(Parse(Example(Entry("task", Ints("\x01")) + Entry("task", Ints("\x02")) + kRest), &buffers)
            .fault == Fault::kNone);
  CHECK(buffers[0].ints == std::vector<int64_t>{2});
  CHECK(Parse(Example(Entry("task", Floats(kHalf) + Ints("\x03")) + kRest), &buffers).fault ==
        Fault::kNone);
  CHECK(buffers[0].ints == std::vector<int64_t>{3});
  // The value before its key, and a list that is there but empty.
  CHECK(
      Parse(Example(Field(1, Field(2, Ints("\x04")) + Field(1, "task")) + kRest), &buffers).fault ==
      Fault::kNone);
  CHECK(buffers[3].ends == std::vector<int64_t>{0});
}

void TestBadContentIsNamed() {
  std::vector<ColumnBuffer> buffers;
  const auto check = [&](const std::string& entries, Fault fault, int column, int64_t found) {
    const ParseResult result = Parse(Example(entries), &buffers);
    CHECK(result.fault == fault);
    CHECK_EQ(result.column, column);
    CHECK_EQ(result.found, found);
    for (const ColumnBuffer& buffer : buffers) {
      CHECK(buffer.ints.empty() && buffer.floats.empty() && buffer.ends.empty());
    }
  };
  check(kRest, Fault::kMissingColumn, 0, 0);
  check(Entry("task", "") + kRest, Fault::kMissingColumn, 0, 0);
  check(Entry("task", Floats(kHalf)) + kRest, Fault::kWrongType, 0, 2);
  check(Entry("task", Field(1, Field(1, "bytes"))) + kRest, Fault::kWrongType, 0, 1);
  check(kRest + Entry("task", Ints("")), Fault::kNotScalar, 0, 0);
  check(Entry("task", Ints("\x01\x02")) + kRest, Fault::kNotScalar, 0, 2);
  check(Entry("task", Ints("\x80")) + kRest, Fault::kNotExample, -1, 0);  // half a varint
  check(Entry("task", Ints(std::string(10, '\x80') + "\x01")) + kRest, Fault::kNotExample, -1, 0);
  check(Entry("weights", Floats("abc")), Fault::kNotExample, -1, 0);  // 3 bytes of floats
  check("\x0a\x7f", Fault::kNotExample, -1, 0);                       // longer than what holds it
  check("\x0b", Fault::kNotExample, -1, 0);                           // a group
}

void TestDamagedPayloadsNeitherCrashNorGrow() {
  std::mt19937 random(7);
  const std::string good =
      Example(Entry("task", Ints("\x09")) + Entry("genre", Ints("\x01\x02\x03")) +
              Entry("rating", Floats(kHalf)) + Entry("weights", Floats(kHalf + kHalf)));
  ExampleParser parser(kColumns);
  std::vector<ColumnBuffer> buffers(kColumns.size());
  int64_t sound = 0;
  for (int i = 0; i < 200000; ++i) {
    std::string payload = good;
    for (int change = static_cast<int>(random() % 4); change >= 0; --change) {
      const size_t at = random() % payload.size();
      switch (random() % 3) {
        case 0:
          payload[at] = static_cast<char>(random());
          break;
        case 1:
          payload.erase(at, 1 + random() % 3);
          break;
        default:
          payload.insert(at, 1, static_cast<char>(random()));
      }
      if (payload.empty()) payload = "x";
    }
    const ParseResult result = parser.Parse(payload, &buffers);
    sound += result.fault == Fault::kNone;
    // Rows stay in step whatever came before.
    CHECK_EQ(buffers[0].ints.size(), static_cast<size_t>(sound));
    CHECK_EQ(buffers[1].ends.size(), static_cast<size_t>(sound));
    CHECK_EQ(buffers[2].floats.size(), static_cast<size_t>(sound));
    CHECK_EQ(buffers[3].ends.size(), static_cast<size_t>(sound));
  }
  CHECK(sound > 100 && sound < 150000);
  CHECK_EQ(buffers[1].ends.back(), static_cast<int64_t>(buffers[1].ints.size()));
}

}  // namespace
}  // namespace gmeta::records

int main() {
  using namespace gmeta::records;
  TestCrcOfKnownMessages();
  TestCrcPathsAgree();
  TestRecordsOfAnySize();
  TestCutAtEveryByte();
  TestEveryFlippedBitIsNoticed();
  TestLengthsBeyondTheEnd();
  TestWhatIsEncodedIsParsed();
  TestFormsOfTheWire();
  TestBadContentIsNamed();
  TestDamagedPayloadsNeitherCrashNorGrow();
}
