// A column of a stripe of events, in the form that takes the fewest bytes.
//
// The columns of a history differ: times rise, ids are spread over a range, an event's kind is one
// of few values, most events have no comment, and the generation that an event was born in is the
// same for a whole stripe. So each column of each stripe has the smallest of these forms:
//
//     0  constant    varint, zigzag: the value of all events
//     1  frame       a patched frame (patched_frame.h) of the values
//     2  steps       varint, zigzag: the first value; a frame of the differences of neighbours
//     3  dictionary  varint k, 2 to 256; the k values, ascending, as steps without the byte of the
//                    form; the place of each event's value among them, in the bits that k - 1 takes
//     4  sparse      varint m; a bitmap of ceil(n / 8) bytes with the events whose value isn't 0;
//                    the column of these m values, in another form
//
// A byte says which. The number of values, n, isn't in the column but in its stripe.
//
//   Type         A value is 64 bits. A column of float32 holds the bits of its numbers as integers,
//                so it comes back to the last bit, NaNs included.
//   Same bytes   The smallest form wins, of equal ones the first. Nothing but the values decides,
//                so every engine that writes a store writes the same bytes.
//   Speed        Every form is decoded by a loop over the events without a branch on their values,
//                but for patches and the bitmap. Nothing is decoded bit by bit.
//   Bounds       Every size is compared with what is left before it is used, and the reader writes
//                n values and no more, whatever the bytes claim. A column ends where its bytes do.

#ifndef GMETA_IO_HISTORY_COLUMN_CODEC_H_
#define GMETA_IO_HISTORY_COLUMN_CODEC_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/history/bit_packing.h"
#include "io/history/patched_frame.h"
#include "io/records/wire.h"

namespace gmeta::history {

enum class Form : uint8_t { kConstant, kFrame, kSteps, kDictionary, kSparse };

inline constexpr size_t kMaxDictionary = 256;

namespace internal {

inline void AppendSteps(const int64_t* values, size_t count, std::string* out) {
  AppendVarint(out, ZigZag(values[0]));
  std::vector<int64_t> steps(count - 1);
  for (size_t i = 1; i < count; ++i) {
    const auto after = static_cast<uint64_t>(values[i]);
    steps[i - 1] = static_cast<int64_t>(after - static_cast<uint64_t>(values[i - 1]));
  }
  AppendFrame(steps.data(), steps.size(), out);
}

inline bool ReadSteps(records::WireReader* reader, size_t count, int64_t* out) {
  uint64_t first;
  if (count == 0 || !reader->ReadVarint(&first)) return false;
  if (!ReadFrame(reader, count - 1, out + 1)) return false;
  auto sum = static_cast<uint64_t>(UnZigZag(first));
  out[0] = static_cast<int64_t>(sum);
  for (size_t i = 1; i < count; ++i) {
    sum += static_cast<uint64_t>(out[i]);
    out[i] = static_cast<int64_t>(sum);
  }
  return true;
}

inline void AppendDictionary(const int64_t* values, size_t count,
                             const std::vector<int64_t>& distinct, std::string* out) {
  AppendVarint(out, distinct.size());
  AppendSteps(distinct.data(), distinct.size(), out);
  std::vector<uint64_t> places(count);
  for (size_t i = 0; i < count; ++i) {
    const auto found = std::lower_bound(distinct.begin(), distinct.end(), values[i]);
    places[i] = static_cast<uint64_t>(found - distinct.begin());
  }
  const int width = BitLength(distinct.size() - 1);
  const size_t begin = out->size();
  out->resize(begin + PackedSize(count, width));
  Pack(places.data(), count, width, out->data() + begin);
}

inline bool ReadDictionary(records::WireReader* reader, size_t count, int64_t* out) {
  uint64_t size;
  int64_t distinct[kMaxDictionary];
  if (!reader->ReadVarint(&size) || size < 2 || size > kMaxDictionary) return false;
  if (!ReadSteps(reader, size, distinct)) return false;
  const int width = BitLength(size - 1);
  std::string_view packed;
  if (!reader->Take(PackedSize(count, width), &packed)) return false;
  Unpack(packed.data(), count, width, reinterpret_cast<uint64_t*>(out));
  uint64_t largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint64_t>(out[i]));
  if (largest >= size) return false;
  for (size_t i = 0; i < count; ++i) out[i] = distinct[out[i]];
  return true;
}

inline void AppendColumn(const int64_t* values, size_t count, bool may_be_sparse, std::string* out);

inline void AppendSparse(const int64_t* values, size_t count, std::string* out) {
  std::vector<int64_t> present;
  std::string bitmap((count + 7) / 8, '\0');
  for (size_t i = 0; i < count; ++i) {
    if (values[i] == 0) continue;
    present.push_back(values[i]);
    bitmap[i / 8] = static_cast<char>(bitmap[i / 8] | 1 << (i % 8));
  }
  AppendVarint(out, present.size());
  out->append(bitmap);
  AppendColumn(present.data(), present.size(), false, out);
}

inline bool ReadColumn(records::WireReader* reader, size_t count, bool may_be_sparse, int64_t* out);

// Reads the m values into the first places, and then moves each to its own, the last one first.
inline bool ReadSparse(records::WireReader* reader, size_t count, int64_t* out) {
  uint64_t present;
  std::string_view bitmap;
  if (!reader->ReadVarint(&present) || present > count) return false;
  if (!reader->Take((count + 7) / 8, &bitmap)) return false;
  size_t bits = 0;
  for (char byte : bitmap) {
    bits += static_cast<size_t>(__builtin_popcount(static_cast<uint8_t>(byte)));
  }
  const bool padded = count % 8 != 0 && static_cast<uint8_t>(bitmap.back()) >> (count % 8) != 0;
  if (bits != present || padded) return false;
  if (!ReadColumn(reader, present, false, out)) return false;
  for (size_t i = count; i-- > 0;) {
    const bool is_present = (static_cast<uint8_t>(bitmap[i / 8]) >> (i % 8) & 1) != 0;
    out[i] = is_present ? out[--present] : 0;
  }
  return true;
}

inline void AppendColumn(const int64_t* values, size_t count, bool may_be_sparse,
                         std::string* out) {
  std::vector<int64_t> distinct(values, values + count);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  if (distinct.size() <= 1) {
    out->push_back(static_cast<char>(Form::kConstant));
    AppendVarint(out, ZigZag(count == 0 ? 0 : values[0]));
    return;
  }
  std::string best(1, static_cast<char>(Form::kFrame));
  AppendFrame(values, count, &best);
  const auto offer = [&best](Form form, const auto& append) {
    std::string made(1, static_cast<char>(form));
    append(&made);
    if (made.size() < best.size()) best.swap(made);
  };
  offer(Form::kSteps, [&](std::string* made) { AppendSteps(values, count, made); });
  if (distinct.size() <= kMaxDictionary) {
    offer(Form::kDictionary,
          [&](std::string* made) { AppendDictionary(values, count, distinct, made); });
  }
  if (may_be_sparse && std::binary_search(distinct.begin(), distinct.end(), 0)) {
    offer(Form::kSparse, [&](std::string* made) { AppendSparse(values, count, made); });
  }
  out->append(best);
}

inline bool ReadColumn(records::WireReader* reader, size_t count, bool may_be_sparse,
                       int64_t* out) {
  std::string_view form;
  uint64_t constant;
  if (!reader->Take(1, &form)) return false;
  switch (static_cast<Form>(form[0])) {
    case Form::kConstant:
      if (!reader->ReadVarint(&constant)) return false;
      std::fill(out, out + count, UnZigZag(constant));
      return true;
    case Form::kFrame:
      return ReadFrame(reader, count, out);
    case Form::kSteps:
      return ReadSteps(reader, count, out);
    case Form::kDictionary:
      return ReadDictionary(reader, count, out);
    case Form::kSparse:
      return may_be_sparse && ReadSparse(reader, count, out);
  }
  return false;
}

}  // namespace internal

// Appends the column of the values.
inline void AppendColumn(const int64_t* values, size_t count, std::string* out) {
  internal::AppendColumn(values, count, true, out);
}

// Reads `count` values from the bytes of a column; returns false if they are malformed.
inline bool ReadColumn(std::string_view bytes, size_t count, int64_t* out) {
  records::WireReader reader(bytes);
  return internal::ReadColumn(&reader, count, true, out) && reader.left() == 0;
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_COLUMN_CODEC_H_
