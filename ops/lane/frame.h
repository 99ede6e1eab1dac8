// The header of the data that a rank sends to another in a collective. It names the collective, so
// ranks in different collectives find out before they take any data, and each can name both. A
// frame without data may also be a notice, which isn't awaited: a rank states why it gives up, or
// in which collective it waits.

#ifndef GMETA_OPS_LANE_FRAME_H_
#define GMETA_OPS_LANE_FRAME_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace gmeta::lane {

enum class Kind : uint32_t {
  kAlltoall = 1,
  kAllreduce = 2,
  kShare = 3,    // the second exchange of a large allreduce
  kGone = 4,     // a notice, whose name is why its sender has failed
  kWaiting = 5,  // a notice: its sender waits in the collective of this sequence number
};

// A collective, as its caller describes it.
struct Call {
  Kind kind;
  uint64_t width;    // of an alltoall, the bytes of a row; of an allreduce, its elements
  std::string type;  // of the elements, for messages and comparison
  std::string name;
  std::vector<int32_t> ranks = {};  // that take part, this one among them; empty: all

  bool Has(int rank) const {
    return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }
};

struct Frame {
  uint64_t sequence = 0;  // collectives of the lane before this one
  uint64_t bytes = 0;     // of the data that follow
  uint64_t width = 0;
  uint64_t name_hash = 0;  // of the whole name
  Kind kind = Kind::kAlltoall;
  char type[12] = {};
  char name[80] = {};  // its end, if it is longer

  Frame() = default;
  Frame(const Call& call, uint64_t sequence) : sequence(sequence), width(call.width) {
    kind = call.kind;
    name_hash = 0xcbf29ce484222325u;  // FNV-1a
    for (const char c : call.name) {
      name_hash = (name_hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    }
    Copy(call.type, type, sizeof type);
    Copy(call.name, name, sizeof name);
  }

  static Frame Notice(Kind kind, uint64_t sequence, const std::string& text) {
    Frame notice;
    notice.kind = kind;
    notice.sequence = sequence;
    Copy(std::string_view(text).substr(0, sizeof name), notice.name, sizeof name);
    return notice;
  }

  std::string Name() const { return Bounded(name, sizeof name); }

  bool Matches(const Frame& other) const {
    return sequence == other.sequence && width == other.width && name_hash == other.name_hash &&
           kind == other.kind && std::memcmp(type, other.type, sizeof type) == 0;
  }

  // For example: alltoall 'rows' of int64, 8 bytes a row, number 17
  std::string Text() const {
    const bool rows = kind == Kind::kAlltoall;
    return std::string(rows ? "alltoall" : "allreduce") + " '" + Name() + "' of " +
           Bounded(type, sizeof type) + ", " + std::to_string(width) +
           (rows ? " bytes a row" : " elements") + ", number " + std::to_string(sequence);
  }

 private:
  static void Copy(std::string_view from, char* to, size_t size) {
    const size_t n = std::min(from.size(), size);
    std::memcpy(to, from.data() + from.size() - n, n);
  }
  static std::string Bounded(const char* text, size_t size) {
    return std::string(text, strnlen(text, size));
  }
};
static_assert(sizeof(Frame) == 128);

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_FRAME_H_
