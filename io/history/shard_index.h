// The index of a shard of histories: for each user the places of the stripes with their events.
//
//     0    char[4]  "GHIX"
//     4    uint32   version, 1
//     8    uint64   users
//     16   uint64   stripes
//     24   uint32   CRC-32C of bytes 0 to 23
//     28   uint32   0
//     32   blocks   of the users, ascending: the columns user, the number of stripes up to its
//                   last, and its deletion
//     ...  blocks   of the stripes: the columns of StripePlace
//
// A block is a stripe (stripe.h) of at most kMaxEvents rows, so the index has the codec and the
// checksums of the events. A stripe's place takes about ten bytes, under a hundredth of its stripe.
//
//   Whole        A reader loads a shard's index whole. A user is then found by a binary search in
//                memory, and only events are read from the store.
//   Files        A stripe names the file that it is in by a number, which the store's manifest
//                resolves. So the index of a generation names stripes of earlier generations too,
//                and an append writes an index and the new stripes, and copies no old one.
//   Deletions    A user's deletion is the generation that deleted all events before it, and 0 if
//                there was none. It distinguishes a user whose events were deleted from one who had
//                none. A user without stripes is listed only for a deletion; one who returned has
//                both.
//   Order        The stripes of a user are ordered by group, then by file, then by offset: in the
//                order in which they were written. Files of later generations have larger numbers.

#ifndef GMETA_IO_HISTORY_SHARD_INDEX_H_
#define GMETA_IO_HISTORY_SHARD_INDEX_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/stripe.h"
#include "ops/common/crc32c.h"

namespace gmeta::history {

// Where a stripe is, and what is known of its events without reading it.
struct StripePlace {
  int64_t group;       // of columns
  int64_t file;        // its number
  int64_t offset;      // in the file, in bytes
  int64_t bytes;       // of the stripe
  int64_t events;      // at least one
  int64_t first;       // the earliest time
  int64_t last;        // the latest time
  int64_t born_first;  // the earliest generation that an event was born in
  int64_t born_last;   // the latest
};

inline constexpr size_t kPlaceColumns = sizeof(StripePlace) / sizeof(int64_t);
static_assert(kPlaceColumns == 9, "a place is an array of its columns");

enum class IndexFault : int {
  kNone = 0,
  kNotIndex,    // other bytes than an index begins with
  kNewer,       // a version that isn't known here
  kTruncated,   // the bytes end early, or continue past the index
  kHeaderCrc,   // the header doesn't match its checksum
  kBadBlock,    // a block is damaged
  kBadContent,  // users or stripes aren't in order, or a place is impossible
};

inline const char* Describe(IndexFault fault) {
  static constexpr const char* kWords[] = {
      "it is sound",
      "it isn't an index of histories",
      "its version isn't known here: a newer gmeta wrote it",
      "it ends early, or continues past its end",
      "its header doesn't match its checksum",
      "a block is damaged",
      "its users or stripes aren't in order",
  };
  return kWords[static_cast<int>(fault)];
}

struct IndexHeader {
  char magic[4] = {'G', 'H', 'I', 'X'};
  uint32_t version = 1;
  uint64_t users = 0;
  uint64_t stripes = 0;
  uint32_t crc = 0;
  uint32_t zero = 0;
};
static_assert(sizeof(IndexHeader) == 32, "it is copied as it is");

class ShardIndex {
 public:
  // Adds a user, which must be larger than the last one, with its stripes in order.
  void Add(int64_t user, const StripePlace* places, size_t count, int64_t deletion = 0) {
    users_.push_back(user);
    deletions_.push_back(deletion);
    places_.insert(places_.end(), places, places + count);
    ends_.push_back(static_cast<int64_t>(places_.size()));
  }

  size_t users() const { return users_.size(); }
  size_t stripes() const { return places_.size(); }
  int64_t user(size_t number) const { return users_[number]; }
  int64_t deletion(size_t number) const { return deletions_[number]; }

  // Returns the stripes of a user: the first, and how many; none if the user isn't there.
  std::pair<const StripePlace*, size_t> Find(int64_t user) const {
    const size_t number = NumberOf(user);
    return number == users() ? std::pair<const StripePlace*, size_t>() : Of(number);
  }

  // Returns whether events of a user that a generation held have been deleted since.
  bool IsDeleted(int64_t user, int64_t generation) const {
    const size_t number = NumberOf(user);
    return number != users() && deletions_[number] > std::max<int64_t>(generation, 0);
  }

  std::pair<const StripePlace*, size_t> Of(size_t number) const {
    const auto begin = number == 0 ? size_t{0} : static_cast<size_t>(ends_[number - 1]);
    return {places_.data() + begin, static_cast<size_t>(ends_[number]) - begin};
  }

  std::string Encode() const {
    IndexHeader header;
    header.users = users_.size();
    header.stripes = places_.size();
    header.crc = HeaderCrc(header);
    std::string out(reinterpret_cast<const char*>(&header), sizeof(header));
    const std::array<const std::vector<int64_t>*, 3> of_users = {&users_, &ends_, &deletions_};
    AppendBlocks<3>(users_.size(), &out,
                    [&](size_t row, size_t column) { return (*of_users[column])[row]; });
    AppendBlocks<kPlaceColumns>(places_.size(), &out, [this](size_t row, size_t column) {
      return Words(places_[row])[column];
    });
    return out;
  }

  // Reads an index, which replaces this one; after a fault the index is empty.
  IndexFault Decode(std::string_view bytes) {
    const IndexFault fault = Read(bytes);
    if (fault != IndexFault::kNone) *this = ShardIndex();
    return fault;
  }

 private:
  using PlaceWords = std::array<int64_t, kPlaceColumns>;

  // Returns the number of a user, or that of users if it isn't there.
  size_t NumberOf(int64_t user) const {
    const auto found = std::lower_bound(users_.begin(), users_.end(), user);
    const bool is_there = found != users_.end() && *found == user;
    return is_there ? static_cast<size_t>(found - users_.begin()) : users();
  }

  static uint32_t HeaderCrc(const IndexHeader& header) {
    return Crc32c(reinterpret_cast<const char*>(&header), offsetof(IndexHeader, crc));
  }

  static PlaceWords Words(const StripePlace& place) {
    PlaceWords words;
    std::memcpy(words.data(), &place, sizeof(place));
    return words;
  }

  template <size_t kColumns, class Value>
  static void AppendBlocks(size_t rows, std::string* out, const Value& value) {
    std::array<std::vector<int64_t>, kColumns> columns;
    std::array<const int64_t*, kColumns> pointers;
    for (size_t begin = 0; begin < rows; begin += kMaxEvents) {
      const size_t end = std::min<size_t>(rows, begin + kMaxEvents);
      for (size_t c = 0; c < kColumns; ++c) {
        columns[c].clear();
        for (size_t row = begin; row < end; ++row) columns[c].push_back(value(row, c));
        pointers[c] = columns[c].data();
      }
      AppendStripe(pointers.data(), kColumns, end - begin, out);
    }
  }

  // Reads blocks until `rows` rows are read, and removes them from the bytes.
  template <size_t kColumns, class Put>
  static bool ReadBlocks(uint64_t rows, std::string_view* bytes, const Put& put) {
    std::vector<int64_t> values;
    for (uint64_t row = 0; row < rows;) {
      Stripe block;
      if (block.Open(*bytes) != StripeFault::kNone || block.columns() != kColumns) return false;
      if (block.events() == 0 || block.events() > rows - row) return false;
      values.resize(block.events());
      for (size_t c = 0; c < kColumns; ++c) {
        if (block.Read(c, values.data()) != StripeFault::kNone) return false;
        for (size_t i = 0; i < values.size(); ++i) put(row + i, c, values[i]);
      }
      row += block.events();
      bytes->remove_prefix(block.size());
    }
    return true;
  }

  IndexFault Read(std::string_view bytes) {
    IndexHeader header;
    if (bytes.size() < sizeof(header)) return IndexFault::kTruncated;
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (std::memcmp(header.magic, IndexHeader().magic, sizeof(header.magic)) != 0) {
      return IndexFault::kNotIndex;
    }
    if (header.version != IndexHeader().version) return IndexFault::kNewer;
    if (HeaderCrc(header) != header.crc) return IndexFault::kHeaderCrc;
    bytes.remove_prefix(sizeof(header));
    // Memory for a row is allocated with its block, so a header that claims too much allocates
    // none.
    const std::array<std::vector<int64_t>*, 3> of_users = {&users_, &ends_, &deletions_};
    const bool has_users =
        ReadBlocks<3>(header.users, &bytes, [&](size_t row, size_t c, int64_t v) {
          std::vector<int64_t>* column = of_users[c];
          if (column->size() <= row) column->resize(row + 1);
          (*column)[row] = v;
        });
    if (!has_users) return IndexFault::kBadBlock;
    const bool has_places =
        ReadBlocks<kPlaceColumns>(header.stripes, &bytes, [this](size_t row, size_t c, int64_t v) {
          if (places_.size() <= row) places_.resize(row + 1);
          std::memcpy(reinterpret_cast<char*>(&places_[row]) + c * sizeof(v), &v, sizeof(v));
        });
    if (!has_places) return IndexFault::kBadBlock;
    if (!bytes.empty()) return IndexFault::kTruncated;
    return IsSound() ? IndexFault::kNone : IndexFault::kBadContent;
  }

  bool IsSound() const {
    int64_t before = 0;
    for (size_t i = 0; i < users_.size(); ++i) {
      if (i > 0 && users_[i] <= users_[i - 1]) return false;
      if (ends_[i] < before || ends_[i] > static_cast<int64_t>(places_.size())) return false;
      if (deletions_[i] < 0 || (deletions_[i] == 0 && ends_[i] == before)) return false;
      before = ends_[i];
    }
    if (before != static_cast<int64_t>(places_.size())) return false;
    return std::all_of(places_.begin(), places_.end(), [](const StripePlace& place) {
      return place.offset >= 0 && place.bytes > 0 && place.bytes <= INT32_MAX && place.events > 0 &&
             place.events <= kMaxEvents && place.first <= place.last &&
             place.born_first <= place.born_last && place.offset <= INT64_MAX - place.bytes;
    });
  }

  std::vector<int64_t> users_, ends_, deletions_;
  std::vector<StripePlace> places_;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_SHARD_INDEX_H_
