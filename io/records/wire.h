// The part of protobuf's wire format that tf.train.Example needs.
//
// A message is fields one after another. Each is a varint tag (field number << 3 | wire type) and a
// value. The wire type determines the value's extent: a varint (0), eight bytes (1), a varint
// length and that many bytes (2), or four bytes (5). Types 3 and 4 are groups, which proto3 doesn't
// have; here they are malformed. A varint carries seven bits a byte, low ones first, and at most
// ten bytes.

#ifndef GMETA_IO_RECORDS_WIRE_H_
#define GMETA_IO_RECORDS_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace gmeta::records {

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

inline constexpr char Tag(uint32_t field, WireType type) {
  return static_cast<char>(field << 3 | type);
}

// Returns the bytes that a varint takes: ceil(bits / 7), without a division or a branch.
inline size_t VarintSize(uint64_t value) {
  const auto log2 = static_cast<size_t>(63 - __builtin_clzll(value | 1));
  return (log2 * 9 + 73) / 64;
}

inline char* WriteVarint(char* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) *out++ = static_cast<char>(value | 0x80);
  *out++ = static_cast<char>(value);
  return out;
}

// Walks over a message and never past its end. Every Read returns false if the bytes end early or
// are malformed, and the walk is over then.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  bool done() const { return at_ == end_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }

  bool ReadVarint(uint64_t* value) {
    if (at_ != end_ && static_cast<uint8_t>(*at_) < 0x80) {
      *value = static_cast<uint8_t>(*at_++);
      return true;
    }
    uint64_t result = 0;
    for (int shift = 0; shift < 70 && at_ != end_; shift += 7) {
      const auto byte = static_cast<uint8_t>(*at_++);
      result |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) {
        *value = result;
        return true;
      }
    }
    return false;
  }

  bool ReadTag(uint32_t* field, uint32_t* type) {
    uint64_t tag;
    if (!ReadVarint(&tag) || tag >> 32 != 0 || tag < 8) return false;
    *field = static_cast<uint32_t>(tag >> 3);
    *type = static_cast<uint32_t>(tag & 7);
    return true;
  }

  bool Take(size_t size, std::string_view* bytes) {
    if (size > left()) return false;
    *bytes = std::string_view(at_, size);
    at_ += size;
    return true;
  }

  bool ReadBytes(std::string_view* bytes) {
    uint64_t size;
    return ReadVarint(&size) && Take(size, bytes);
  }

  bool ReadFloat(float* value) {
    if (left() < sizeof(*value)) return false;
    std::memcpy(value, at_, sizeof(*value));
    at_ += sizeof(*value);
    return true;
  }

  bool Skip(uint32_t type) {
    uint64_t ignored;
    std::string_view bytes;
    switch (type) {
      case kVarint:
        return ReadVarint(&ignored);
      case kBytes:
        return ReadBytes(&bytes);
      case kFixed64:
      case kFixed32: {
        const size_t size = type == kFixed64 ? 8 : 4;
        if (left() < size) return false;
        at_ += size;
        return true;
      }
      default:
        return false;
    }
  }

 private:
  const char* at_;
  const char* end_;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_WIRE_H_
