// TFRecord framing: appending records to a buffer, and taking them out of bytes again.
//
// A file is records one after another, each of
//
//     uint64  length              little endian
//     uint32  masked CRC-32C      of the eight bytes of the length
//     byte    payload[length]
//     uint32  masked CRC-32C      of the payload
//
// and nothing else: no header, no index, no end mark. So a record can be found only by walking, and
// only its length leads to the next record. A file cut exactly between two records looks whole
// (only a manifest with file sizes reveals that).
//
// A length is trusted only if its CRC matches, and is compared with the bytes that are left before
// it is used. The order also decides what is reported: a length that passes its CRC and reaches
// past the end means that the bytes were cut, not that the length is wrong.
//
//   fault       | next record
//   ------------+----------------------------------------------
//   kTruncated  | none: the bytes end here
//   kLengthCrc  | none: without a length there is no way onwards
//   kDataCrc    | follows: the length was sound

#ifndef GMETA_IO_RECORDS_TFRECORD_H_
#define GMETA_IO_RECORDS_TFRECORD_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "io/records/fault.h"
#include "ops/common/crc32c.h"

namespace gmeta::records {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "lengths and values are copied as they are");

inline constexpr size_t kHeaderBytes = sizeof(uint64_t) + sizeof(uint32_t);
inline constexpr size_t kFooterBytes = sizeof(uint32_t);

// Writes the header of a record of `length` bytes to `out`, which has room for kHeaderBytes.
inline void WriteHeader(char* out, uint64_t length) {
  std::memcpy(out, &length, sizeof(length));
  const uint32_t crc = MaskedCrc32c(out, sizeof(length));
  std::memcpy(out + sizeof(length), &crc, sizeof(crc));
}

// Writes the footer of the payload that ends at `out`.
inline void WriteFooter(char* out, uint64_t length) {
  const uint32_t crc = MaskedCrc32c(out - length, length);
  std::memcpy(out, &crc, sizeof(crc));
}

// Appends one framed record.
inline void AppendRecord(std::string_view payload, std::string* out) {
  const size_t start = out->size();
  out->resize(start + kHeaderBytes + payload.size() + kFooterBytes);
  char* p = out->data() + start;
  WriteHeader(p, payload.size());
  std::memcpy(p + kHeaderBytes, payload.data(), payload.size());
  WriteFooter(p + kHeaderBytes + payload.size(), payload.size());
}

// Takes the first record from bytes that are records one after another. With kDataCrc, `left` moves
// after the record all the same; with kLengthCrc and kTruncated it stays, because the next record
// can't be found. `length` is the one that the header states, if there is a header.
inline Fault TakeRecord(std::string_view* left, std::string_view* payload, uint64_t* length) {
  if (left->size() < kHeaderBytes) return Fault::kTruncated;
  const char* header = left->data();
  std::memcpy(length, header, sizeof(*length));
  uint32_t crc;
  std::memcpy(&crc, header + sizeof(*length), sizeof(crc));
  if (crc != MaskedCrc32c(header, sizeof(*length))) return Fault::kLengthCrc;
  const uint64_t behind = left->size() - kHeaderBytes;
  if (behind < kFooterBytes || *length > behind - kFooterBytes) return Fault::kTruncated;
  const char* data = header + kHeaderBytes;
  left->remove_prefix(kHeaderBytes + static_cast<size_t>(*length) + kFooterBytes);
  std::memcpy(&crc, data + *length, sizeof(crc));
  if (crc != MaskedCrc32c(data, *length)) return Fault::kDataCrc;
  *payload = std::string_view(data, *length);
  return Fault::kNone;
}

// Bytes that can be read at any offset: a local file, a remote one, or memory.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual uint64_t size() const = 0;
  // Reads up to `count` bytes at `offset` into `out` and returns how many. A smaller number means
  // that the source ends there or, if `error` was set, that reading failed.
  virtual size_t Read(uint64_t offset, size_t count, char* out, std::string* error) = 0;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_TFRECORD_H_
