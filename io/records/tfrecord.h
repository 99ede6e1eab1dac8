// TFRecord framing: appending records to a buffer, and reading them back from any source of bytes.
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
// The reader keeps one look-ahead buffer and hands out payloads as views into it:
//
//       buffer_    [ ....consumed.... | record | record | rec ]
//                                     ^cursor_            ^end_
//       file             ^ base_ = offset in the file of buffer_[0]
//
// A record that isn't wholly in the buffer is moved to the front, and the rest is read in behind
// it. So every byte of the file is read once and copied at most once more; otherwise a payload is
// never copied. Seeking forwards over a record that is too long keeps nothing; seeking backwards
// isn't needed, because records are only parsed in place.
//
// A bad file must not make the reader allocate. So a length is believed only after its CRC, then
// compared with the rest of the file, then with a limit, and only then may it size the buffer. The
// order also decides what is reported: a length that passes its CRC and reaches past the end of the
// file means that the file was cut, not that the length is wrong.
//
//   fault       | next record
//   ------------+----------------------------------------------
//   kTruncated  | none: the file ends here
//   kLengthCrc  | none: without a length there is no way onwards
//   kDataCrc    | follows: the length was sound
//   kTooLong    | follows, for the same reason
//   kRead       | none: the source itself failed

#ifndef GMETA_IO_RECORDS_TFRECORD_H_
#define GMETA_IO_RECORDS_TFRECORD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

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
// behind the record all the same; with kLengthCrc and kTruncated it stays, because the next record
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

class RecordReader {
 public:
  struct Options {
    size_t look_ahead = 256 << 10;
    uint64_t max_record = 256 << 20;
  };

  // `source` must outlive the reader.
  explicit RecordReader(ByteSource* source) : RecordReader(source, Options()) {}
  RecordReader(ByteSource* source, Options options)
      : source_(source), options_(options), size_(source->size()) {}

  // Reads the next record. Returns false at the end of the file. Otherwise, `*fault` says whether
  // `*payload` is sound; it is valid until the next call.
  bool Next(std::string_view* payload, Fault* fault) {
    offset_ = base_ + cursor_;
    if (over_ || offset_ >= size_) return false;
    *fault = Read(payload);
    over_ = *fault == Fault::kTruncated || *fault == Fault::kLengthCrc || *fault == Fault::kRead;
    return true;
  }

  // Returns where the record, or the fault, that Next() reported begins.
  uint64_t offset() const { return offset_; }
  // Returns the length in that record's header, for messages.
  uint64_t length() const { return length_; }
  // Returns the source's message if it failed (kRead).
  const std::string& error() const { return error_; }

 private:
  Fault Read(std::string_view* payload) {
    length_ = 0;
    if (Fault fault = Ensure(kHeaderBytes); fault != Fault::kNone) return fault;
    const char* header = buffer_.data() + cursor_;
    std::memcpy(&length_, header, sizeof(length_));
    uint32_t crc;
    std::memcpy(&crc, header + sizeof(length_), sizeof(crc));
    if (crc != MaskedCrc32c(header, sizeof(length_))) return Fault::kLengthCrc;

    const uint64_t left = size_ - offset_ - kHeaderBytes;
    if (left < kFooterBytes || length_ > left - kFooterBytes) return Fault::kTruncated;
    if (length_ > options_.max_record) {
      Skip(kHeaderBytes + length_ + kFooterBytes);
      return Fault::kTooLong;
    }
    const size_t whole = kHeaderBytes + static_cast<size_t>(length_) + kFooterBytes;
    if (Fault fault = Ensure(whole); fault != Fault::kNone) return fault;
    std::string_view record(buffer_.data() + cursor_, whole);
    cursor_ += whole;
    return TakeRecord(&record, payload, &length_);
  }

  // Makes sure that the buffer holds `count` bytes from the cursor on.
  Fault Ensure(size_t count) {
    if (end_ - cursor_ >= count) return Fault::kNone;
    if (size_ - offset_ < count) return Fault::kTruncated;
    if (end_ > cursor_) std::memmove(buffer_.data(), buffer_.data() + cursor_, end_ - cursor_);
    base_ += cursor_;
    end_ -= cursor_;
    cursor_ = 0;
    if (buffer_.size() < count) buffer_.resize(std::max(count, options_.look_ahead));
    const uint64_t at = base_ + end_;
    const auto wanted = static_cast<size_t>(std::min<uint64_t>(buffer_.size() - end_, size_ - at));
    end_ += source_->Read(at, wanted, buffer_.data() + end_, &error_);
    if (!error_.empty()) return Fault::kRead;
    // If bytes are missing, the file has shrunk since it was opened.
    return end_ >= count ? Fault::kNone : Fault::kTruncated;
  }

  void Skip(uint64_t count) {
    if (count <= end_ - cursor_) {
      cursor_ += count;
    } else {
      base_ += cursor_ + count;
      cursor_ = end_ = 0;
    }
  }

  ByteSource* const source_;
  const Options options_;
  const uint64_t size_;
  std::vector<char> buffer_;
  uint64_t base_ = 0;
  size_t cursor_ = 0;
  size_t end_ = 0;
  uint64_t offset_ = 0;
  uint64_t length_ = 0;
  bool over_ = false;
  std::string error_;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_TFRECORD_H_
