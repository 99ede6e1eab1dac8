// Inputs made of other inputs.
//
// Random bytes would stop at the first checksum. So what is changed is, most of the time, the
// payload of a record, which is framed again with a sound length and checksums, and an index is
// moved along with the shard that it describes; the rest of the time the bytes of a file are
// changed as they are, and the checksums put right, or not. Numbers come from what code compares
// (comparisons that failed in the parent's execution say which number to write where) and from the
// ends of the ranges of integers.

#ifndef GMETA_TESTS_NATIVE_FUZZ_MUTATOR_H_
#define GMETA_TESTS_NATIVE_FUZZ_MUTATOR_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/group_batch/shard_index.h"
#include "io/records/tfrecord.h"
#include "io/records/wire.h"
#include "tests/native/fuzz/coverage.h"
#include "tests/native/fuzz/target.h"

namespace gmeta::fuzz {

class Mutator {
 public:
  static constexpr size_t kLargest = 16 << 10;  // of a file

  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t Below(size_t n) { return static_cast<size_t>(random_() % n); }
  bool OneIn(size_t n) { return Below(n) == 0; }

  // Another input like `parent`; `other` is one of the same target, to take pieces from.
  Input Mutate(const Input& parent, const Input& other, bool indexed,
               const std::vector<Comparison>& comparisons) {
    Input input = parent;
    const size_t changes = 1 + Below(OneIn(4) ? 16 : 3);
    for (size_t i = 0; i < changes; ++i) {
      const size_t part = Below(input.size());
      const std::string& piece = other[std::min(part, other.size() - 1)];
      if (indexed && part % 2 == 1) {
        ChangeIndex(&input[part], piece, comparisons);
      } else if (OneIn(4)) {
        Change(&input[part], piece, comparisons);
      } else {
        ChangeRecord(&input[part], piece, comparisons, indexed ? &input[part + 1] : nullptr);
      }
    }
    for (size_t i = 0; i < input.size(); ++i) {
      if (input[i].size() > kLargest) input[i].resize(kLargest);
      if (!OneIn(8) && !(indexed && i % 2 == 1)) RepairRecords(&input[i]);
    }
    for (size_t i = 0; indexed && i < input.size(); i += 2) {
      if (!OneIn(4)) RepairIndex(input[i], &input[i + 1]);
    }
    return input;
  }

 private:
  static constexpr size_t kHead = 32;  // bytes before an index's entries
  static constexpr size_t kEntry = sizeof(group_batch::IndexEntry);
  static constexpr size_t kFrame = records::kHeaderBytes + records::kFooterBytes;

  uint64_t Number() {
    static constexpr uint64_t kEnds[] = {
        0,          1,          0x7f,       0x80,       0xff,       0x100,       0x7fff,
        0x8000,     0xffff,     0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, 1ull << 30,
        1ull << 40, 1ull << 48, 1ull << 61, INT64_MAX,  1ull << 63, UINT64_MAX};
    return kEnds[Below(std::size(kEnds))] + (OneIn(4) ? Below(17) - 8 : 0);
  }

  static std::string Bytes(uint64_t number, size_t width) {
    return std::string(reinterpret_cast<const char*>(&number), width);
  }

  static std::string Varint(uint64_t number) {
    char bytes[10];
    return std::string(bytes, records::WriteVarint(bytes, number));
  }

  // One change of the bytes.
  void Change(std::string* bytes, const std::string& other,
              const std::vector<Comparison>& comparisons) {
    if (bytes->empty()) *bytes = std::string(1 + Below(16), '\0');
    const size_t at = Below(bytes->size()), left = bytes->size() - at;
    const size_t run = 1 + Below(std::min<size_t>(left, OneIn(8) ? 512 : 16));
    const size_t width = size_t{1} << Below(4);
    switch (Below(11)) {
      case 0:
        (*bytes)[at] = static_cast<char>((*bytes)[at] ^ 1 << Below(8));
        break;
      case 1:
        (*bytes)[at] = static_cast<char>(random_());
        break;
      case 2:
        bytes->erase(at, run);
        break;
      case 3:
        bytes->insert(at, std::string(run, static_cast<char>(OneIn(2) ? 0 : random_())));
        break;
      case 4:
        bytes->insert(at, bytes->substr(Below(bytes->size()), run));
        break;
      case 5: {
        const size_t from = Below(other.size() + 1);
        const std::string piece = other.substr(from, run);
        OneIn(2) ? bytes->insert(at, piece) : bytes->replace(at, piece.size(), piece);
        break;
      }
      case 6:
        bytes->replace(at, std::min(width, left), Bytes(Number(), width));
        break;
      case 7:
        OneIn(2) ? bytes->insert(at, Varint(Number())) : bytes->replace(at, 1, Varint(Number()));
        break;
      case 8:  // arrays are padded to eight bytes, and nothing may follow the last one
        OneIn(4) ? bytes->append(8 * width, '\0')
                 : bytes->erase(bytes->size() - std::min(bytes->size(), 8 * width));
        break;
      default:
        if (!comparisons.empty()) Answer(comparisons[Below(comparisons.size())], bytes);
    }
  }

  // Writes what a number was compared with in the place of the number, if it is found.
  void Answer(const Comparison& comparison, std::string* bytes) {
    uint64_t from = comparison.a, to = comparison.b;
    if (OneIn(2)) std::swap(from, to);
    if (OneIn(4)) to += OneIn(2) ? 1 : -1;
    size_t width = comparison.width;
    while (width > 1 && OneIn(2)) width /= 2;  // it was widened before it was compared
    const bool varint = OneIn(4);
    const std::string wanted = varint ? Varint(from) : Bytes(from, width);
    std::vector<size_t> places;
    for (size_t at = bytes->find(wanted); at != std::string::npos && places.size() < 64;
         at = bytes->find(wanted, at + 1)) {
      places.push_back(at);
    }
    if (places.empty()) return;
    bytes->replace(places[Below(places.size())], wanted.size(),
                   varint ? Varint(to) : Bytes(to, width));
  }

  // Where records begin, as far as their lengths lead.
  static std::vector<std::pair<size_t, size_t>> Records(const std::string& file) {
    std::vector<std::pair<size_t, size_t>> found;  // offset, bytes of the payload
    for (size_t at = 0; file.size() - at >= kFrame;) {
      uint64_t length;
      std::memcpy(&length, file.data() + at, sizeof(length));
      if (length > file.size() - at - kFrame) break;
      found.emplace_back(at, length);
      at += kFrame + length;
    }
    return found;
  }

  // Changes, doubles, drops or swaps a record, its frame and its place in the index kept right.
  void ChangeRecord(std::string* file, const std::string& other,
                    const std::vector<Comparison>& comparisons, std::string* index) {
    const auto records = Records(*file);
    if (records.empty()) return Change(file, other, comparisons);
    const auto [at, length] = records[Below(records.size())];
    std::string payload = file->substr(at + records::kHeaderBytes, length), framed;
    const size_t what = Below(16);
    if (what == 0) {
      records::AppendRecord(payload, &framed);
    } else if (what == 1) {
      const auto theirs = Records(other);
      if (theirs.empty()) return;
      const auto [from, size] = theirs[Below(theirs.size())];
      payload = other.substr(from + records::kHeaderBytes, size);
    } else if (what > 2) {
      const size_t changes = 1 + Below(4);
      for (size_t i = 0; i < changes; ++i) Change(&payload, other, comparisons);
    }
    if (what != 2) records::AppendRecord(payload, &framed);  // 2: dropped
    const auto delta = static_cast<int64_t>(framed.size()) - static_cast<int64_t>(kFrame + length);
    file->replace(at, kFrame + length, framed);
    if (index == nullptr) return;
    for (size_t entry = kHead; entry + kEntry <= index->size(); entry += kEntry) {
      int64_t offset;
      std::memcpy(&offset, index->data() + entry, sizeof(offset));
      if (offset > static_cast<int64_t>(at) && offset < INT64_MAX / 2) {
        index->replace(entry, sizeof(offset), Bytes(static_cast<uint64_t>(offset + delta), 8));
      }
    }
  }

  // Changes a field of an entry, or an entry, or bytes.
  void ChangeIndex(std::string* index, const std::string& other,
                   const std::vector<Comparison>& comparisons) {
    const size_t entries = index->size() < kHead + 4 ? 0 : (index->size() - kHead - 4) / kEntry;
    if (entries == 0 || OneIn(8)) return Change(index, other, comparisons);
    const size_t at = kHead + kEntry * Below(entries), from = kHead + kEntry * Below(entries);
    const size_t field = 8 * Below(kEntry / 8);
    const std::string entry = index->substr(from, kEntry);
    switch (Below(8)) {
      case 0:
        index->insert(at, entry);
        break;
      case 1:
        index->erase(at, kEntry);
        break;
      case 2:
        index->replace(at, kEntry, entry);
        break;
      case 3:
        index->replace(at + field, 8, entry.substr(field, 8));
        break;
      case 4:
        index->replace(at + field, 8, Bytes(Number(), 8));
        break;
      case 5: {
        uint64_t value;
        std::memcpy(&value, index->data() + at + field, sizeof(value));
        index->replace(at + field, 8, Bytes(value + Below(33) - 16, 8));
        break;
      }
      default:
        Answer(comparisons.empty() ? Comparison{0, 1, 8} : comparisons[Below(comparisons.size())],
               index);
    }
  }

  // Sets the checksums to what they should be; a length that leads out of the file stays.
  void RepairRecords(std::string* file) {
    for (size_t at = 0; file->size() - at >= kFrame;) {
      uint64_t length;
      std::memcpy(&length, file->data() + at, sizeof(length));
      if (length > file->size() - at - kFrame && OneIn(2)) length = file->size() - at - kFrame;
      records::WriteHeader(file->data() + at, length);
      if (length > file->size() - at - kFrame) return;
      records::WriteFooter(file->data() + at + records::kHeaderBytes + length, length);
      at += kFrame + length;
    }
  }

  // Makes the header right, and the checksums of groups that are records of the shard.
  void RepairIndex(const std::string& shard, std::string* index) {
    if (index->size() < kHead + 4) return;
    index->replace(16, 8, Bytes((index->size() - kHead - 4) / kEntry, 8));
    if (!OneIn(4)) index->replace(24, 8, Bytes(shard.size(), 8));
    for (size_t at = kHead; at + kEntry <= index->size() && !OneIn(16); at += kEntry) {
      group_batch::IndexEntry entry;
      std::memcpy(&entry, index->data() + at, sizeof(entry));
      for (const auto& [offset, length] : Records(shard)) {
        if (static_cast<int64_t>(offset) != entry.offset) continue;
        entry.crc = Crc32c(shard.data() + offset + records::kHeaderBytes, length);
      }
      index->replace(at, kEntry, reinterpret_cast<const char*>(&entry), kEntry);
    }
  }

  std::mt19937_64 random_;
};

}  // namespace gmeta::fuzz

#endif  // GMETA_TESTS_NATIVE_FUZZ_MUTATOR_H_
