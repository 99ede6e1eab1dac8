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
//                except for patches and the bitmap. Nothing is decoded bit by bit.
//   Bounds       Every size is compared with what is left before it is used, and the reader writes
//                n values and no more, whatever the bytes claim. A column ends where its bytes do.

#ifndef GMETA_IO_HISTORY_COLUMN_CODEC_H_
#define GMETA_IO_HISTORY_COLUMN_CODEC_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/bit_packing.h"
#include "io/history/patched_frame.h"
#include "io/records/wire.h"

namespace gmeta::history {

enum class Form : uint8_t { kConstant, kFrame, kSteps, kDictionary, kSparse };

inline constexpr size_t kMaxDictionary = 256;

namespace internal {

// The values as steps, to be written: at least one.
class StepsPlan {
 public:
  StepsPlan(const int64_t* values, size_t count)
      : first_(ZigZag(values[0])), steps_(Differences(values, count).data(), count - 1) {}

  size_t size() const { return records::VarintSize(first_) + steps_.size(); }

  void Append(std::string* out) const {
    AppendVarint(out, first_);
    steps_.Append(out);
  }

 private:
  static std::vector<int64_t> Differences(const int64_t* values, size_t count) {
    std::vector<int64_t> found(count - 1);
    for (size_t i = 1; i < count; ++i) {
      const auto after = static_cast<uint64_t>(values[i]);
      found[i - 1] = static_cast<int64_t>(after - static_cast<uint64_t>(values[i - 1]));
    }
    return found;
  }

  uint64_t first_;
  FramePlan steps_;
};

inline bool ReadSteps(records::WireReader* reader, size_t count, int64_t* out) {
  uint64_t first;
  if (count == 0 || !reader->ReadVarint(&first)) return false;
  if (!ReadFrame(reader, count - 1, out + 1)) return false;
  auto sum = static_cast<uint64_t>(UnZigZag(first));
  out[0] = static_cast<int64_t>(sum);
  auto* steps = reinterpret_cast<uint64_t*>(out);
  size_t i = 1;
  for (; i + 4 <= count; i += 4) {  // only one of these additions waits for the four before
    const uint64_t two = steps[i] + steps[i + 1], four = two + (steps[i + 2] + steps[i + 3]);
    steps[i + 2] += sum + two;
    steps[i] += sum;
    steps[i + 1] = sum + two;
    sum += four;
    steps[i + 3] = sum;
  }
  for (; i < count; ++i) steps[i] = sum += steps[i];
  return true;
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

inline bool ReadColumn(records::WireReader* reader, size_t count, bool may_be_sparse, int64_t* out);

// Reads the m values into the first places, and then moves each to its own, 64 events at a time,
// the last ones first: no more values can lie before these events than there are events before
// them.
inline bool ReadSparse(records::WireReader* reader, size_t count, int64_t* out) {
  uint64_t present;
  std::string_view bitmap;
  if (!reader->ReadVarint(&present) || present > count) return false;
  if (!reader->Take((count + 7) / 8, &bitmap)) return false;
  const auto word_of = [bitmap](size_t begin) {
    uint64_t word = 0;
    std::memcpy(&word, bitmap.data() + begin / 8, std::min<size_t>(8, bitmap.size() - begin / 8));
    return word;
  };
  size_t bits = 0;
  for (size_t i = 0; i < count; i += 64) {
    bits += static_cast<size_t>(__builtin_popcountll(word_of(i)));
  }
  const bool padded = count % 8 != 0 && static_cast<uint8_t>(bitmap.back()) >> (count % 8) != 0;
  if (bits != present || padded) return false;
  if (!ReadColumn(reader, present, false, out)) return false;
  std::array<int64_t, 64> own;
  for (size_t begin = (count + 63) / 64 * 64; begin > 0;) {
    begin -= 64;
    uint64_t word = word_of(begin);
    const auto some = static_cast<size_t>(__builtin_popcountll(word));
    present -= some;
    std::copy_n(out + present, some, own.data());
    std::fill(out + begin, out + std::min(count, begin + 64), 0);
    for (size_t i = 0; word != 0; word &= word - 1) {
      out[begin + static_cast<size_t>(__builtin_ctzll(word))] = own[i++];
    }
  }
  return true;
}

// Returns the distinct values, ascending.
inline std::vector<int64_t> Distinct(const int64_t* values, size_t count) {
  constexpr uint64_t kNarrow = 4096;
  std::vector<int64_t> found;
  if (count == 0) return found;
  const auto [least, most] = std::minmax_element(values, values + count);
  const auto base = static_cast<uint64_t>(*least);
  if (static_cast<uint64_t>(*most) - base < kNarrow) {  // by a bit for each value, without sorting
    std::array<uint64_t, kNarrow / 64> is_there{};
    for (size_t i = 0; i < count; ++i) {
      const uint64_t above = static_cast<uint64_t>(values[i]) - base;
      is_there[above / 64] |= uint64_t{1} << (above % 64);
    }
    for (size_t i = 0; i < is_there.size(); ++i) {
      for (uint64_t word = is_there[i]; word != 0; word &= word - 1) {
        const auto above = 64 * i + static_cast<size_t>(__builtin_ctzll(word));
        found.push_back(static_cast<int64_t>(base + above));
      }
    }
    return found;
  }
  found.assign(values, values + count);
  if (!std::is_sorted(found.begin(), found.end())) std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

// The smallest form of a column, to be written. The sizes of all forms are computed, but only the
// smallest form is made.
class ColumnPlan {
 public:
  ColumnPlan(const int64_t* values, size_t count)
      : ColumnPlan(values, count, Distinct(values, count), true) {}

  size_t size() const { return size_; }

  void Append(std::string* out) const {
    out->push_back(static_cast<char>(form_));
    switch (form_) {
      case Form::kConstant:
        return AppendVarint(out, ZigZag(count_ == 0 ? 0 : values_[0]));
      case Form::kFrame:
        return frame_->Append(out);
      case Form::kSteps:
        return steps_->Append(out);
      case Form::kDictionary:
        return AppendDictionary(out);
      case Form::kSparse:
        return AppendSparse(out);
    }
  }

 private:
  // Args:
  //   distinct: The distinct values, ascending.
  ColumnPlan(const int64_t* values, size_t count, std::vector<int64_t> distinct, bool may_be_sparse)
      : values_(values), count_(count), distinct_(std::move(distinct)) {
    if (distinct_.size() <= 1) {
      form_ = Form::kConstant;
      size_ = 1 + records::VarintSize(ZigZag(count == 0 ? 0 : values[0]));
      return;
    }
    Offer(Form::kFrame, frame_.emplace(values, count).size());
    Offer(Form::kSteps, steps_.emplace(values, count).size());
    const size_t places = PackedSize(count, DictionaryWidth());
    if (distinct_.size() <= kMaxDictionary && places < size_) {
      dictionary_.emplace(distinct_.data(), distinct_.size());
      Offer(Form::kDictionary,
            records::VarintSize(distinct_.size()) + dictionary_->size() + places);
    }
    const auto zero = std::lower_bound(distinct_.begin(), distinct_.end(), 0);
    const bool has_zero = zero != distinct_.end() && *zero == 0;
    if (may_be_sparse && has_zero && (count + 7) / 8 < size_) {
      for (size_t i = 0; i < count; ++i) {
        if (values[i] != 0) present_values_.push_back(values[i]);
      }
      const auto at = zero - distinct_.begin();
      std::vector<int64_t> others = distinct_;
      others.erase(others.begin() + at);
      present_.reset(
          new ColumnPlan(present_values_.data(), present_values_.size(), std::move(others), false));
      Offer(Form::kSparse,
            records::VarintSize(present_values_.size()) + (count + 7) / 8 + present_->size());
    }
  }

  void Offer(Form form, size_t size) {
    if (1 + size >= size_) return;
    size_ = 1 + size;
    form_ = form;
  }

  int DictionaryWidth() const { return BitLength(distinct_.size() - 1); }

  void AppendDictionary(std::string* out) const {
    AppendVarint(out, distinct_.size());
    dictionary_->Append(out);
    std::vector<uint64_t> places(count_);
    for (size_t i = 0; i < count_; ++i) {
      const auto found = std::lower_bound(distinct_.begin(), distinct_.end(), values_[i]);
      places[i] = static_cast<uint64_t>(found - distinct_.begin());
    }
    const size_t begin = out->size();
    out->resize(begin + PackedSize(count_, DictionaryWidth()));
    Pack(places.data(), count_, DictionaryWidth(), out->data() + begin);
  }

  void AppendSparse(std::string* out) const {
    AppendVarint(out, present_values_.size());
    const size_t begin = out->size();
    out->resize(begin + (count_ + 7) / 8, '\0');
    for (size_t i = 0; i < count_; ++i) {
      char* const byte = out->data() + begin + i / 8;
      *byte = static_cast<char>(*byte | (values_[i] != 0) << (i % 8));
    }
    present_->Append(out);
  }

  const int64_t* values_;
  size_t count_;
  std::vector<int64_t> distinct_;
  Form form_ = Form::kFrame;
  size_t size_ = SIZE_MAX;
  std::optional<FramePlan> frame_;
  std::optional<StepsPlan> steps_;
  std::optional<StepsPlan> dictionary_;  // the distinct values
  std::vector<int64_t> present_values_;
  std::unique_ptr<ColumnPlan> present_;  // of the values that aren't 0
};

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
  internal::ColumnPlan(values, count).Append(out);
}

// Reads `count` values from the bytes of a column; returns false if they are malformed.
inline bool ReadColumn(std::string_view bytes, size_t count, int64_t* out) {
  records::WireReader reader(bytes);
  return internal::ReadColumn(&reader, count, true, out) && reader.left() == 0;
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_COLUMN_CODEC_H_
