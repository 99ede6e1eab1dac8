// The index beside a shard (gmeta/core/group_index.py has the format), read a piece at a time.
//
// A big data set has tens of millions of groups, and 48 bytes of index for each. A reader needs
// only the entries of the window that it reads, so it reads just those: entries have one size, and
// number n is at byte 32 + 48 n. Nothing of the index stays in memory.
//
// Opening makes the checks that cost nothing: the header, the sizes of index and shard, the number
// of groups that the plan expects, and whether the checksum at the end is the manifest's. The
// entries are checked when each group is read, in every field: a wrong entry can only lead to bytes
// that differ from what it says.

#ifndef GMETA_IO_GROUP_BATCH_SHARD_INDEX_H_
#define GMETA_IO_GROUP_BATCH_SHARD_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "io/group_batch/problem.h"
#include "io/records/tfrecord.h"

namespace gmeta::group_batch {

struct IndexEntry {
  int64_t offset = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
  GroupKey key;
  uint32_t crc = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(IndexEntry) == 48, "it is copied as it is");

// What the plan says about a shard.
struct ShardSpec {
  std::string path;
  int64_t groups = 0;
  int64_t index_crc = -1;  // of its index; -1: the manifest has none
};

class ShardIndex {
 public:
  static constexpr const char* kSuffix = ".gidx";

  // `shard_bytes` is the shard's actual size.
  ShardIndex(const ShardSpec& spec, Layout layout, uint64_t shard_bytes,
             std::unique_ptr<records::ByteSource> source)
      : spec_(spec), layout_(layout), shard_bytes_(shard_bytes), source_(std::move(source)) {}

  // Compares the index's header with the plan and the shard. Returns kNone if they agree.
  Finding Check() {
    Header header;
    uint32_t crc;
    const uint64_t size = source_->size();
    const uint64_t expected = sizeof(header) + uint64_t{sizeof(IndexEntry)} * spec_.groups + 4;
    if (size < sizeof(header) + 4) return Bad("the index has " + std::to_string(size) + " bytes");
    if (Finding finding = Read(0, sizeof(header), &header); finding.fault != Fault::kNone) {
      return finding;
    }
    if (std::memcmp(header.magic, "GIDX", 4) != 0) return Bad("it isn't an index of groups");
    if (header.version != 1 || header.reserved != 0) {
      return Bad("the index is of version " + std::to_string(header.version) +
                 ", which isn't known here");
    }
    if (header.layout != static_cast<uint32_t>(layout_)) {
      return Bad("the index is of a shard in another layout than the manifest says");
    }
    if (header.groups != static_cast<uint64_t>(spec_.groups) || size != expected) {
      return Bad("the index has " + std::to_string(header.groups) + " groups in " +
                 std::to_string(size) + " bytes, the manifest says " +
                 std::to_string(spec_.groups) + " groups");
    }
    if (header.shard_bytes < shard_bytes_) {
      return Bad("the index is of a shard of " + std::to_string(header.shard_bytes) +
                 " bytes, the shard has " + std::to_string(shard_bytes_));
    }
    shard_bytes_ = header.shard_bytes;  // a shard that was cut can be read as far as it goes
    if (Finding finding = Read(size - 4, 4, &crc); finding.fault != Fault::kNone) return finding;
    if (spec_.index_crc >= 0 && crc != static_cast<uint32_t>(spec_.index_crc)) {
      return Bad("the index isn't the one that the manifest names: its checksum differs");
    }
    return {};
  }

  // Returns the size that the shard should have.
  uint64_t shard_bytes() const { return shard_bytes_; }

  // Reads entries `first` to `first + count - 1`, followed by one whose offset is the end of the
  // last of them. Returns a finding if that fails.
  Finding ReadEntries(int64_t first, int64_t count, std::vector<IndexEntry>* entries) {
    const bool all = first + count < spec_.groups;
    entries->resize(static_cast<size_t>(count) + 1);
    entries->back() = {};
    entries->back().offset = static_cast<int64_t>(shard_bytes_);
    return Read(sizeof(Header) + sizeof(IndexEntry) * static_cast<uint64_t>(first),
                sizeof(IndexEntry) * static_cast<size_t>(count + (all ? 1 : 0)), entries->data());
  }

 private:
  struct Header {
    char magic[4];
    uint32_t version;
    uint32_t layout;
    uint32_t reserved;
    uint64_t groups;
    uint64_t shard_bytes;
  };
  static_assert(sizeof(Header) == 32, "it is copied as it is");

  static Finding Bad(std::string what) {
    return {Fault::kBadIndex, 0, std::move(what), "prepare the data again, or copy both files"};
  }

  Finding Read(uint64_t offset, size_t count, void* out) {
    std::string error;
    const size_t got = source_->Read(offset, count, static_cast<char*>(out), &error);
    if (!error.empty()) return FramingFinding(Fault::kRead, 0, error);
    if (got != count) return Bad("the index ends at byte " + std::to_string(offset + got));
    return {};
  }

  const ShardSpec spec_;
  const Layout layout_;
  uint64_t shard_bytes_;
  const std::unique_ptr<records::ByteSource> source_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_SHARD_INDEX_H_
