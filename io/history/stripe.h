// A stripe: some consecutive events of one user, stored by column.
//
// A store of histories cuts a user's events into stripes of a few hundred. A reader that needs the
// last thousand events reads the last few stripes and no others, and decodes only the columns of
// these that it needs. So a stripe has a directory, and a checksum for each column rather than one
// for all.
//
//     0    char[4]   "GHST"
//     4    uint16    version, 1
//     6    uint16    columns
//     8    uint32    events, at most kMaxEvents
//     12   uint32    CRC-32C of the directory, continued over bytes 0 to 11
//     16   pairs     for each column: uint32 its bytes, uint32 their CRC-32C
//     ...  columns   one after another (column_codec.h)
//
// Numbers are little endian, and nothing is padded: columns are a few bytes to a few hundred, and
// are decoded by loads that needn't be aligned. Names and types are the store's, not the stripe's.

#ifndef GMETA_IO_HISTORY_STRIPE_H_
#define GMETA_IO_HISTORY_STRIPE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "io/history/column_codec.h"
#include "ops/common/crc32c.h"

namespace gmeta::history {

inline constexpr uint32_t kMaxEvents = 1 << 16;

enum class StripeFault : int {
  kNone = 0,
  kNotStripe,     // other bytes than a stripe begins with
  kNewer,         // a version that isn't known here
  kTruncated,     // the bytes end before the stripe does
  kDirectoryCrc,  // the header or the directory doesn't match its checksum
  kColumnCrc,     // a column doesn't match its checksum
  kBadColumn,     // a column matches its checksum but is malformed
  kOther,         // it is sound, but not the stripe that the index means
};

// The message of a fault, to follow "it" or a stripe's place.
inline const char* Describe(StripeFault fault) {
  static constexpr const char* kWords[] = {
      "it is sound",
      "it isn't a stripe of events",
      "its version isn't known here: a newer gmeta wrote it",
      "it ends early",
      "its directory doesn't match its checksum",
      "a column doesn't match its checksum",
      "a column is malformed",
      "it isn't the stripe that the index means: its events have other times or births",
  };
  return kWords[static_cast<int>(fault)];
}

struct StripeHeader {
  char magic[4] = {'G', 'H', 'S', 'T'};
  uint16_t version = 1;
  uint16_t columns = 0;
  uint32_t events = 0;
  uint32_t crc = 0;
};
static_assert(sizeof(StripeHeader) == 16, "it is copied as it is");

struct StripeEntry {
  uint32_t size = 0;
  uint32_t crc = 0;
};
static_assert(sizeof(StripeEntry) == 8, "it is copied as it is");

// Returns the bytes of the header and the directory.
inline size_t DirectorySize(size_t columns) {
  return sizeof(StripeHeader) + columns * sizeof(StripeEntry);
}

// Returns the checksum of a header and the directory after it, whose CRC isn't covered.
inline uint32_t DirectoryCrc(const char* stripe, size_t columns) {
  const char* entries = stripe + sizeof(StripeHeader);
  const uint32_t of_entries = Crc32c(entries, columns * sizeof(StripeEntry));
  return Crc32c(stripe, offsetof(StripeHeader, crc), of_entries);
}

// Appends a stripe.
//
// Args:
//   columns: For each column the values of all events.
//   count: How many columns, at most 65,535.
//   events: How many events, at most kMaxEvents.
inline void AppendStripe(const int64_t* const* columns, size_t count, size_t events,
                         std::string* out) {
  StripeHeader header;
  header.columns = static_cast<uint16_t>(count);
  header.events = static_cast<uint32_t>(events);
  const size_t begin = out->size();
  out->resize(begin + DirectorySize(count));
  for (size_t i = 0; i < count; ++i) {
    const size_t at = out->size();
    AppendColumn(columns[i], events, out);
    StripeEntry entry;
    entry.size = static_cast<uint32_t>(out->size() - at);
    entry.crc = Crc32c(out->data() + at, entry.size);
    std::memcpy(out->data() + begin + DirectorySize(i), &entry, sizeof(entry));
  }
  std::memcpy(out->data() + begin, &header, sizeof(header));
  header.crc = DirectoryCrc(out->data() + begin, count);
  std::memcpy(out->data() + begin, &header, sizeof(header));
}

// A stripe in memory, which it doesn't own.
class Stripe {
 public:
  // Opens the stripe that the bytes begin with, and checks its directory. Its columns are checked
  // when they are read.
  StripeFault Open(std::string_view bytes) {
    StripeHeader header;
    if (bytes.size() < sizeof(header)) return StripeFault::kTruncated;
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (std::memcmp(header.magic, StripeHeader().magic, sizeof(header.magic)) != 0) {
      return StripeFault::kNotStripe;
    }
    if (header.version != StripeHeader().version) return StripeFault::kNewer;
    if (bytes.size() < DirectorySize(header.columns)) return StripeFault::kTruncated;
    if (DirectoryCrc(bytes.data(), header.columns) != header.crc || header.events > kMaxEvents) {
      return StripeFault::kDirectoryCrc;
    }
    bytes_ = bytes;
    columns_ = header.columns;
    events_ = header.events;
    size_ = DirectorySize(columns_);
    for (size_t i = 0; i < columns_; ++i) size_ += Entry(i).size;
    return size_ > bytes.size() ? StripeFault::kTruncated : StripeFault::kNone;
  }

  size_t columns() const { return columns_; }
  size_t events() const { return events_; }
  // The bytes of the whole stripe.
  size_t size() const { return size_; }

  // Reads the values of all events of a column into `out`.
  StripeFault Read(size_t column, int64_t* out) const {
    size_t at = DirectorySize(columns_);
    for (size_t i = 0; i < column; ++i) at += Entry(i).size;
    const StripeEntry entry = Entry(column);
    if (Crc32c(bytes_.data() + at, entry.size) != entry.crc) {
      return StripeFault::kColumnCrc;
    }
    return ReadColumn(bytes_.substr(at, entry.size), events_, out) ? StripeFault::kNone
                                                                   : StripeFault::kBadColumn;
  }

 private:
  StripeEntry Entry(size_t column) const {
    StripeEntry entry;
    std::memcpy(&entry, bytes_.data() + DirectorySize(column), sizeof(entry));
    return entry;
  }

  std::string_view bytes_;
  size_t columns_ = 0, events_ = 0, size_ = 0;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_STRIPE_H_
