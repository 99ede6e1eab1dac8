// What the parser of the columnar layout makes of payloads that were cut, damaged or made to
// deceive.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "io/records/columnar.h"
#include "io/records/columnar_parser.h"
#include "tests/native/check.h"
#include "tests/native/group_table.h"

namespace {
size_t allocated = 0;  // bytes asked for since it was set to zero
}  // namespace

// Never inlined: the compiler would take malloc and delete for a mismatch.
__attribute__((noinline)) void* operator new(size_t size) {
  allocated += size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace gmeta::records {
namespace {

void TestTooShortAndTooLong() {
  const Table table = Sample();
  for (const std::string& payload : table.Columnar(kEnds)) {
    // With and without a schema that is known already.
    for (bool warm : {false, true}) {
      ColumnarParser parser(table.columns, 3, 1);
      std::vector<ColumnBuffer> buffers(7), kept(7);
      int64_t rows;
      if (warm) {
        CHECK(Parse(&parser, payload, &buffers, &rows).fault == Fault::kNone);
        kept = buffers;
      }
      for (size_t cut = 0; cut < payload.size(); ++cut) {
        CHECK(Parse(&parser, payload.substr(0, cut), &buffers, &rows).fault == Fault::kNotColumnar);
      }
      for (size_t more : {1, 7, 8, 100}) {
        const std::string longer = payload + std::string(more, '\0');
        CHECK(Parse(&parser, longer, &buffers, &rows).fault == Fault::kNotColumnar);
      }
      CHECK(Same(buffers, kept));
    }
  }
}

// A frame of so few bytes can't become what the record claims, so it gets no memory for it.
void TestAClaimThatNoFrameCanMeet() {
  columnar::Header header;
  header.flags = columnar::kZstd;
  header.rows = 1;
  std::string payload(reinterpret_cast<const char*>(&header), sizeof(header));
  const uint64_t claim = uint64_t{200} << 20;
  payload.append(reinterpret_cast<const char*>(&claim), sizeof(claim));
  payload.append(60, 'x');
  const Table table = Sample();
  ColumnarParser parser(table.columns, 3, 1);
  std::vector<ColumnBuffer> buffers(7);
  int64_t rows;
  allocated = 0;
  const Fault fault = parser.Parse(payload, &buffers, &rows).fault;
  CHECK(fault == Fault::kNotColumnar || fault == Fault::kNoCodec);
  CHECK(allocated < 1 << 20);
}

// Whether what a parser took keeps the rows of all columns in step.
void CheckInStep(const std::vector<ColumnSpec>& columns, const std::vector<ColumnBuffer>& buffers,
                 int64_t rows) {
  for (size_t i = 0; i < columns.size(); ++i) {
    const size_t size = buffers[i].size(columns[i].dtype);
    if (!columns[i].is_list) {
      CHECK_EQ(size, static_cast<size_t>(rows));
      continue;
    }
    CHECK_EQ(buffers[i].ends.size(), static_cast<size_t>(rows));
    int64_t before = 0;
    for (int64_t end : buffers[i].ends) {
      CHECK(end >= before);
      before = end;
    }
    CHECK_EQ(static_cast<size_t>(before), size);
  }
}

// Parses with fresh buffers, and checks what it allocates. Returns whether it was taken.
bool ParseDamaged(ColumnarParser* parser, const std::string& payload) {
  std::vector<ColumnBuffer> buffers(parser->columns().size());
  int64_t rows = 0;
  allocated = 0;
  const Fault fault = Parse(parser, payload, &buffers, &rows).fault;
  // 3000: a schema's names in a table, the buckets of the table, and the like.
  CHECK(allocated <= 33 * payload.size() + 3000);
  if (fault == Fault::kNone) {
    CheckInStep(parser->columns(), buffers, rows);
  } else {
    CHECK(Same(buffers, std::vector<ColumnBuffer>(buffers.size())));
  }
  return fault == Fault::kNone;
}

void TestDamagedPayloadsNeitherCrashNorGrow() {
  const Table table = Sample();
  const std::vector<std::string> payloads = table.Columnar(kEnds);
  ColumnarParser parser(table.columns, 3, 1);
  // Every bit of the small groups.
  for (size_t group : {1, 2}) {
    int taken = 0, refused = 0;
    for (size_t bit = 0; bit < 8 * payloads[group].size(); ++bit) {
      std::string bad = payloads[group];
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
      (ParseDamaged(&parser, bad) ? taken : refused) += 1;
    }
    // Values, the key and padding may be anything; the rest is noticed.
    CHECK(taken > 300 && refused > 500);
  }
  std::mt19937_64 random(7);
  for (int i = 0; i < 100000; ++i) {
    std::string bad = payloads[random() % 4];
    const size_t head = std::min<size_t>(bad.size(), 170);
    for (int change = static_cast<int>(random() % 4); change >= 0; --change) {
      const size_t at = random() % (random() % 4 != 0 ? head : bad.size());
      uint64_t word = random() >> random() % 64;
      switch (random() % 4) {
        case 0:
          bad[at] = static_cast<char>(random());
          break;
        case 1:
          bad.erase(at / 8 * 8, 8);
          break;
        case 2:
          bad.insert(at / 8 * 8, 8, static_cast<char>(random() % 4));
          break;
        default:
          std::memcpy(&bad[at / 8 * 8], &word, std::min<size_t>(8, bad.size() - at / 8 * 8));
      }
      if (bad.size() < 180) bad.resize(180);
    }
    ParseDamaged(&parser, bad);
  }
}

// A payload built by hand: columns of a schema, then whatever follows it.
std::string ByHand(uint32_t columns, const std::string& schema, int64_t rows,
                   const std::vector<uint64_t>& descriptors, const std::string& arrays) {
  columnar::Header header;
  header.columns = columns;
  header.schema = static_cast<uint32_t>(schema.size());
  header.rows = rows;
  std::string payload(reinterpret_cast<const char*>(&header), sizeof(header));
  payload += schema;
  payload.resize(columnar::Padded(payload.size()));
  for (uint64_t word : descriptors) payload.append(reinterpret_cast<const char*>(&word), 8);
  return payload + arrays;
}

void TestLiesAreFound() {
  const std::string key("\0\4task\0\5batch", 13);
  const std::string one = key + std::string("\2\1a", 3);  // a list of int64
  ColumnarParser parser({{"task", kInt, false}, {"batch", kInt, false}, {"a", kInt, true}}, 0, 1);
  std::vector<ColumnBuffer> buffers(3);
  int64_t rows;
  const auto fault = [&](const std::string& payload) {
    allocated = 0;
    const Fault found = Parse(&parser, payload, &buffers, &rows).fault;
    CHECK(allocated <= 33 * payload.size() + 3000);
    return found;
  };
  const auto descriptor = [](uint64_t values, uint8_t length, uint8_t width) {
    return columnar::Descriptor{values, length, width}.word();
  };
  const std::string lengths("\2\1\0\0\0\0\0\0", 8), values("\7\7\7\0\0\0\0\0", 8);
  CHECK(fault(ByHand(1, one, 2, {descriptor(3, 1, 1)}, lengths + values)) == Fault::kNone);
  buffers.assign(3, {});
  const Fault bad = Fault::kNotColumnar;
  CHECK(fault(ByHand(1, one, 2, {descriptor(4, 1, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(1, one, 2, {descriptor(2, 1, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(1, one, 2, {descriptor(3, 3, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(1, one, 2, {descriptor(3, 1, 3)}, lengths + values)) == bad);
  CHECK(fault(ByHand(1, one, 2, {descriptor(3, 0, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(1, one, 2, {descriptor((uint64_t{1} << 48) - 1, 1, 8)}, lengths + values)) ==
        bad);
  CHECK(fault(ByHand(1, one, 0, {descriptor(0, 1, 1)}, "")) == bad);
  CHECK(fault(ByHand(1, one, -1, {descriptor(0, 1, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(2, one, 2, {descriptor(3, 1, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(0, one, 2, {descriptor(3, 1, 1)}, lengths + values)) == bad);
  CHECK(fault(ByHand(UINT32_MAX, one, 2, {descriptor(3, 1, 1)}, lengths + values)) == bad);
  // Lengths of eight bytes whose sum wraps round to three.
  const uint64_t wrapping[] = {UINT64_MAX, 4};
  const std::string huge(reinterpret_cast<const char*>(wrapping), sizeof(wrapping));
  CHECK(fault(ByHand(1, one, 2, {descriptor(3, 8, 1)}, huge + values)) == bad);
  // Schemas: a name twice, the key's own again, a kind that isn't there, a name beyond the end.
  const std::vector<uint64_t> two(2, descriptor(3, 1, 1));
  const std::string arrays = lengths + values + lengths + values;
  CHECK(fault(ByHand(2, one + std::string("\2\1b", 3), 2, two, arrays)) == Fault::kNone);
  CHECK(fault(ByHand(2, one + std::string("\2\1a", 3), 2, two, arrays)) == bad);
  CHECK(fault(ByHand(2, one + std::string("\2\4task", 6), 2, two, arrays)) == bad);
  CHECK(fault(ByHand(2, one + std::string("\4\1b", 3), 2, two, arrays)) == bad);
  CHECK(fault(ByHand(2, one + std::string("\2\2b", 3), 2, two, arrays)) == bad);
  CHECK(fault(ByHand(1, std::string("\1\4task\0\5batch\2\1a", 16), 2, {two[0]},
                     lengths + values)) == bad);
  CHECK(fault(ByHand(0, "", 2, {}, lengths)) == bad);
  CHECK_EQ(buffers[0].ints.size(), 2u);

  // Many columns in a schema of a few bytes each, without arrays for them.
  std::string many = key;
  for (int i = 0; i < 10000; ++i) {
    many += std::string("\0\2", 2) + static_cast<char>(i % 256) + static_cast<char>(i / 256);
  }
  CHECK(fault(ByHand(10000, many, 1, {}, "")) == bad);
  CHECK(fault(ByHand(100, many, 1, {}, std::string(3200, '\1'))) == bad);
}

void TestAKeyAloneCantClaimRowsThatItDoesntBring() {
  Table table({{"task", kInt, false}, {"batch", kInt, false}});
  table.Ints("task", std::vector<int64_t>(21, 5));
  table.Ints("batch", std::vector<int64_t>(21, 6));
  std::string greedy = table.Columnar({21})[0];
  const int64_t claim = int64_t{1} << 40;
  std::memcpy(&greedy[16], &claim, sizeof(claim));
  ColumnarParser parser(table.columns, 0, 1);
  std::vector<ColumnBuffer> buffers(2);
  int64_t rows;
  allocated = 0;
  CHECK(Parse(&parser, greedy, &buffers, &rows).fault == Fault::kNotColumnar);
  CHECK(allocated < 1000);
  CHECK(Same(buffers, std::vector<ColumnBuffer>(2)));
}

}  // namespace
}  // namespace gmeta::records

int main() {
  using namespace gmeta::records;
  TestAClaimThatNoFrameCanMeet();
  TestTooShortAndTooLong();
  TestDamagedPayloadsNeitherCrashNorGrow();
  TestLiesAreFound();
  TestAKeyAloneCantClaimRowsThatItDoesntBring();
}
