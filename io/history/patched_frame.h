// A frame of numbers: the smallest of them, and the distance of each from it, in few bits.
//
// A frame whose width fits its largest number wastes bits on all others if that number is an
// outlier, as the pauses between sessions are among the seconds between events. So the frame has
// the width b that makes it smallest, and a list of patches stores the further bits of numbers that
// don't fit b bits (PFOR: Zukowski et al., "Super-Scalar RAM-CPU Cache Compression", 2006).
//
//     varint   the smallest number, as zigzag
//     byte     b: 0 to 56, or 64
//     varint   how many patches
//     bits     the low b bits of each number's distance from the smallest
//     varints  the patched numbers' places: the first, then the distances between them
//     varints  their further bits
//
// Distances are modulo 2^64, so a frame holds any 64-bit numbers. The width depends on nothing but
// the numbers: equal numbers make equal bytes.

#ifndef GMETA_IO_HISTORY_PATCHED_FRAME_H_
#define GMETA_IO_HISTORY_PATCHED_FRAME_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/history/bit_packing.h"
#include "io/records/wire.h"

namespace gmeta::history {

inline uint64_t ZigZag(int64_t number) {
  return static_cast<uint64_t>(number) << 1 ^ static_cast<uint64_t>(number >> 63);
}

inline int64_t UnZigZag(uint64_t number) {
  return static_cast<int64_t>(number >> 1 ^ (~(number & 1) + 1));
}

inline void AppendVarint(std::string* out, uint64_t number) {
  std::array<char, 10> bytes;
  out->append(bytes.data(), records::WriteVarint(bytes.data(), number));
}

// A frame to be written: its size is known before its bytes.
class FramePlan {
 public:
  FramePlan(const int64_t* numbers, size_t count) : distances_(count) {
    base_ = count == 0 ? 0 : *std::min_element(numbers, numbers + count);
    std::array<uint32_t, 65> of_length{};
    for (size_t i = 0; i < count; ++i) {
      distances_[i] = static_cast<uint64_t>(numbers[i]) - static_cast<uint64_t>(base_);
      ++of_length[static_cast<size_t>(BitLength(distances_[i]))];
    }
    width_ = BestWidth(of_length, count);
    size_t patches = 0;
    for (auto length = static_cast<size_t>(width_) + 1; length <= 64; ++length) {
      patches += of_length[length];
    }
    if (patches > 0) FindPatches(patches);
    size_ = records::VarintSize(ZigZag(base_)) + 1 + records::VarintSize(patches) +
            PackedSize(count, width_);
    size_t before = 0;
    for (size_t place : patched_) {
      size_ += records::VarintSize(place - before);
      size_ += records::VarintSize(distances_[place] >> width_);
      before = place;
    }
  }

  size_t size() const { return size_; }

  void Append(std::string* out) const {
    AppendVarint(out, ZigZag(base_));
    out->push_back(static_cast<char>(width_));
    AppendVarint(out, patched_.size());
    const size_t begin = out->size();
    out->resize(begin + PackedSize(distances_.size(), width_));
    Pack(distances_.data(), distances_.size(), width_, out->data() + begin);
    size_t before = 0;
    for (size_t place : patched_) {
      AppendVarint(out, place - before);
      before = place;
    }
    for (size_t place : patched_) AppendVarint(out, distances_[place] >> width_);
  }

 private:
  // Returns the width that makes a frame smallest, the widest of those that do.
  //
  // Args:
  //   of_length: How many distances have so many bits, 0 to 64.
  static int BestWidth(const std::array<uint32_t, 65>& of_length, size_t count) {
    std::array<int, 65> lengths;  // those that occur, the longest first
    size_t known = 0;
    for (int length = 64; length > 0; --length) {
      if (of_length[static_cast<size_t>(length)] > 0) lengths[known++] = length;
    }
    int best = 64;
    size_t least = SIZE_MAX;
    for (int width = 64; width >= 0; width = width == 64 ? kWidestLoad : width - 1) {
      size_t size = PackedSize(count, width);
      for (size_t i = 0; i < known && lengths[i] > width; ++i) {
        // A place, which mostly takes one byte, and the further bits.
        const auto bytes = static_cast<size_t>(1 + (lengths[i] - width + 6) / 7);
        size += of_length[static_cast<size_t>(lengths[i])] * bytes;
      }
      if (size < least) {
        least = size;
        best = width;
      }
    }
    return best;
  }

  void FindPatches(size_t patches) {
    patched_.reserve(patches);
    const uint64_t most = LowBits(~uint64_t{0}, width_);
    for (size_t i = 0; i < distances_.size(); ++i) {
      if (distances_[i] > most) patched_.push_back(i);
    }
  }

  std::vector<uint64_t> distances_;
  std::vector<size_t> patched_;
  int64_t base_;
  int width_;
  size_t size_;
};

// Reads a frame of `count` numbers; returns false if it is malformed.
inline bool ReadFrame(records::WireReader* reader, size_t count, int64_t* out) {
  uint64_t base, patches;
  std::string_view width, packed;
  if (!reader->ReadVarint(&base) || !reader->Take(1, &width) || !reader->ReadVarint(&patches)) {
    return false;
  }
  const auto bits = static_cast<uint8_t>(width[0]);
  if (!IsWidth(bits) || patches > count || (bits == 64 && patches > 0)) return false;
  if (!reader->Take(PackedSize(count, bits), &packed)) return false;
  auto* distances = reinterpret_cast<uint64_t*>(out);
  Unpack(packed.data(), count, bits, distances);
  records::WireReader places = *reader;
  uint64_t ignored;
  for (uint64_t i = 0; i < patches; ++i) {
    if (!reader->ReadVarint(&ignored)) return false;
  }
  uint64_t place = 0;
  for (uint64_t i = 0; i < patches; ++i) {
    uint64_t further, distance;
    if (!places.ReadVarint(&distance) || !reader->ReadVarint(&further)) return false;
    if (distance >= count - place || (i > 0 && distance == 0)) return false;
    place += distance;
    if (further == 0 || BitLength(further) > 64 - bits) return false;
    distances[place] |= further << bits;
  }
  const auto start = static_cast<uint64_t>(UnZigZag(base));
  for (size_t i = 0; i < count; ++i) distances[i] += start;
  return true;
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_PATCHED_FRAME_H_
