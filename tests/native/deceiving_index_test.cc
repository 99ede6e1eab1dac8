// Indices that say what can't be, of shards that are sound or cut: what they cost, and that they
// cost no memory. The fuzzer (tests/native/fuzz) found each of these.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "io/group_batch/group_block.h"
#include "io/group_batch/group_window.h"
#include "tests/native/check.h"
#include "tests/native/fuzz/tables.h"
#include "tests/native/memory_source.h"

namespace gmeta::group_batch {
namespace {

using fuzz::SampleFile;
using fuzz::SampleIndex;
using records::kEnds;

constexpr size_t kGroups = 4;

// Adds up what is asked of it.
class CountedSource : public records::MemorySource {
 public:
  CountedSource(const std::string& bytes, size_t* asked) : MemorySource(bytes), asked_(asked) {}
  size_t Read(uint64_t offset, size_t count, char* out, std::string* error) override {
    *asked_ += count;
    return MemorySource::Read(offset, count, out, error);
  }

 private:
  size_t* const asked_;
};

struct Shard {
  explicit Shard(Layout layout)
      : layout(layout), bytes(SampleFile(layout, false)), index(SampleIndex(layout, false)) {}

  IndexEntry entry(size_t i) const {
    IndexEntry entry;
    std::memcpy(&entry, index.data() + 32 + 48 * i, sizeof(entry));
    return entry;
  }
  void Set(size_t i, const IndexEntry& entry) { std::memcpy(&index[32 + 48 * i], &entry, 48); }
  void SetShardBytes(uint64_t size) { std::memcpy(&index[24], &size, sizeof(size)); }

  // All groups, parsed. `asked`: bytes of the shard that were asked for.
  GroupBlock Read(size_t* asked = nullptr) const {
    size_t ignored = 0;
    const auto open = [&](const std::string& path,
                          std::string*) -> std::unique_ptr<records::ByteSource> {
      if (path != "shard") return std::make_unique<records::MemorySource>(index);
      return std::make_unique<CountedSource>(bytes, asked == nullptr ? &ignored : asked);
    };
    WindowLoader loader({{"shard", kGroups, 0xfeed}}, layout, open);
    BlockOptions options;
    options.columns = fuzz::Written().columns;
    options.task = fuzz::Written().task;
    options.batch = fuzz::Written().batch;
    options.layout = layout;
    options.paths = {"shard"};
    BlockParser parser(options);
    GroupBlock block;
    block.columns.resize(options.columns.size());
    const auto window = loader.Load({0, 1, 2, 3});
    for (const LoadedGroup& group : window->groups) parser.Parse(group, &block);
    fuzz::CheckInStep(options.columns, block.columns, block.entries.back().row_end);
    return block;
  }

  const Layout layout;
  std::string bytes, index;
};

int64_t Skipped(const GroupBlock& block) {
  int64_t skipped = 0;
  for (const auto& found : block.problems) {
    CHECK(found.problem.skipped >= 0);
    skipped += found.problem.skipped;
  }
  return skipped;
}

// The index says that the last group reaches far beyond the end of the file.
void TestALengthBeyondTheShardIsNotAskedFor(Layout layout) {
  Shard shard(layout);
  shard.SetShardBytes(uint64_t{1} << 29);
  size_t asked = 0;
  const GroupBlock block = shard.Read(&asked);
  CHECK(asked <= shard.bytes.size());
  CHECK(block.entries[2].sound && !block.entries[3].sound);
  CHECK_EQ(block.problems.size(), size_t{1});
  CHECK(block.problems[0].problem.fault == Fault::kTruncated);
}

// Every other group reaches over the whole shard.
void TestBytesThatAreNamedTwiceAreReadOnce(Layout layout) {
  Shard shard(layout);
  const std::vector<IndexEntry> entries = {shard.entry(0), shard.entry(1), shard.entry(2),
                                           shard.entry(3)};
  for (size_t i = 0; i < kGroups; ++i) {
    IndexEntry entry = entries[i];
    entry.offset = i % 2 == 0 ? 0 : entries[3].offset;
    shard.Set(i, entry);
  }
  size_t asked = 0;
  const GroupBlock block = shard.Read(&asked);
  CHECK(asked <= shard.bytes.size());
  CHECK_EQ(block.entries.size(), kGroups);
  CHECK(block.entries[3].sound);
  CHECK(!block.entries[0].sound && !block.entries[1].sound && !block.entries[2].sound);
}

// More rows than bytes: nothing of that is believed, and nothing counted as left out.
void TestRowsThatCantBe(Layout layout) {
  for (const int64_t rows : {int64_t{1} << 40, INT64_MAX, int64_t{-1}, INT64_MIN, int64_t{0}}) {
    Shard shard(layout);
    IndexEntry entry = shard.entry(1);
    entry.rows = rows;
    shard.Set(1, entry);
    const GroupBlock block = shard.Read();
    CHECK_EQ(block.problems.size(), size_t{1});
    CHECK(block.problems[0].problem.fault == Fault::kBadIndex);
    CHECK_EQ(Skipped(block), 0);
    CHECK(block.entries[0].sound && !block.entries[1].sound && block.entries[2].sound);
  }
}

// Where rows are alike, zstd leaves fewer bytes than there are rows; they can be there all the
// same.
void TestACompressedGroupMayHaveMoreRowsThanBytes() {
  if (records::Zstd::Get() == nullptr) return;
  constexpr int64_t kRows = 5000;
  fuzz::Wanted wanted{
      {{"task", records::DType::kInt64, false}, {"batch", records::DType::kInt64, false}}, 0, 1};
  records::Table table(wanted.columns);
  table.Ints("task", std::vector<int64_t>(kRows, 7));
  table.Ints("batch", std::vector<int64_t>(kRows, 1));
  records::ColumnarEncoder encoder(wanted.columns, 0, 1, records::Zstd::Get());
  std::vector<int64_t> bytes;
  std::vector<uint32_t> crcs;
  std::string file, index = SampleIndex(Layout::kColumnar, false);
  for (const std::string& payload : table.Encode(&encoder, {kRows}, 1 << 20, &bytes, &crcs)) {
    records::AppendRecord(payload, &file);
  }
  CHECK(file.size() < kRows);
  const uint64_t one = 1, size = file.size();
  const IndexEntry entry{0, 0, kRows, {7, 1}, crcs[0], 0};
  std::memcpy(&index[16], &one, sizeof(one));
  std::memcpy(&index[24], &size, sizeof(size));
  std::memcpy(&index[32], &entry, sizeof(entry));
  index.erase(32 + 48, 3 * 48);
  const auto open = [&](const std::string& path, std::string*) {
    return std::make_unique<records::MemorySource>(path == "shard" ? file : index);
  };
  WindowLoader loader({{"shard", 1, 0xfeed}}, Layout::kColumnar, open);
  BlockOptions options;
  options.columns = wanted.columns;
  options.paths = {"shard"};
  BlockParser parser(options);
  GroupBlock block;
  block.columns.resize(2);
  parser.Parse(loader.Load({0})->groups[0], &block);
  CHECK(block.problems.empty());
  CHECK_EQ(block.entries[0].row_end, kRows);
}

// A group of nine examples, of which the index counts fewer, and one is damaged: what there is
// more of isn't handed out, and what is left out is counted once, as the index counts it.
void TestMoreRowsThanTheIndexCounts() {
  const int64_t rows = kEnds[3] - kEnds[2];
  for (const size_t at : {size_t{20}, size_t{0}}) {  // of the payload, of the length
    for (int64_t counted = 1; counted <= rows; ++counted) {
      for (int64_t damaged = 0; damaged < rows; ++damaged) {
        Shard shard(Layout::kExample);
        IndexEntry entry = shard.entry(3);
        entry.rows = counted;
        shard.Set(3, entry);
        auto record = static_cast<size_t>(entry.offset);
        for (int64_t i = 0; i < damaged; ++i) {
          uint64_t length;
          std::memcpy(&length, shard.bytes.data() + record, sizeof(length));
          record += 16 + length;
        }
        shard.bytes[record + at] = static_cast<char>(shard.bytes[record + at] ^ 1);
        const GroupBlock block = shard.Read();
        const int64_t read = block.entries[3].row_end - block.entries[2].row_end;
        CHECK(!block.problems.empty());
        CHECK_EQ(read + Skipped(block), counted);
        // Behind a lost length there may be any number of rows.
        const bool told_apart = at != 0 || damaged >= counted;
        CHECK(read == 0 || (told_apart ? counted == rows : damaged < counted));
      }
    }
  }
}

}  // namespace
}  // namespace gmeta::group_batch

int main() {
  using namespace gmeta::group_batch;
  for (const Layout layout : {Layout::kExample, Layout::kColumnar}) {
    TestALengthBeyondTheShardIsNotAskedFor(layout);
    TestBytesThatAreNamedTwiceAreReadOnce(layout);
    TestRowsThatCantBe(layout);
  }
  TestACompressedGroupMayHaveMoreRowsThanBytes();
  TestMoreRowsThanTheIndexCounts();
}
