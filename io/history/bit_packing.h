// Numbers of a few bits each, one after another.
//
// Number i of width b takes the bits i * b to i * b + b - 1 of the bytes, low bits and low bytes
// first. A number of up to 56 bits lies within eight bytes of the one that it begins in, so it is
// read by one load of eight bytes that needn't be aligned, a shift and a mask: no loop over bytes,
// no branch. Wider numbers than that take all 64 bits. The last few numbers are read from a copy,
// because eight bytes from where they begin would pass the end.

#ifndef GMETA_IO_HISTORY_BIT_PACKING_H_
#define GMETA_IO_HISTORY_BIT_PACKING_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gmeta::history {

inline constexpr int kWidestLoad = 56;

inline bool IsWidth(uint64_t width) { return width <= kWidestLoad || width == 64; }

// Returns the number of bits of the number, 0 for 0.
inline int BitLength(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

// Returns the width that numbers of so many bits are stored in.
inline int WidthFor(int bits) { return bits <= kWidestLoad ? bits : 64; }

inline size_t PackedSize(size_t count, int width) {
  return (count * static_cast<size_t>(width) + 7) / 8;
}

inline uint64_t LowBits(uint64_t number, int width) {
  return width == 64 ? number : number & ((uint64_t{1} << width) - 1);
}

// Writes the low `width` bits of each number into PackedSize() bytes.
inline void Pack(const uint64_t* numbers, size_t count, int width, char* out) {
  if (count == 0) return;
  if (width == 64) {
    std::memcpy(out, numbers, 8 * count);
    return;
  }
  uint64_t waiting = 0;
  int bits = 0;  // of `waiting`, at most 7 between two numbers
  for (size_t i = 0; i < count; ++i) {
    waiting |= LowBits(numbers[i], width) << bits;
    for (bits += width; bits >= 8; bits -= 8, waiting >>= 8) *out++ = static_cast<char>(waiting);
  }
  if (bits > 0) *out = static_cast<char>(waiting);
}

// Reads `count` numbers from PackedSize() bytes.
inline void Unpack(const char* data, size_t count, int width, uint64_t* out) {
  if (count == 0) return;
  if (width == 64) {
    std::memcpy(out, data, 8 * count);
    return;
  }
  if (width == 0) {
    std::fill(out, out + count, uint64_t{0});
    return;
  }
  const auto b = static_cast<size_t>(width);
  const uint64_t mask = (uint64_t{1} << b) - 1;
  const size_t size = PackedSize(count, width);
  // Those that begin at least eight bytes before the end.
  const size_t within = size < 8 ? 0 : std::min(count, ((size - 8) * 8 + 7) / b + 1);
  const auto read = [b, mask](const char* from, size_t bit) {
    uint64_t word;
    std::memcpy(&word, from + bit / 8, sizeof(word));
    return (word >> (bit % 8)) & mask;
  };
  for (size_t i = 0; i < within; ++i) out[i] = read(data, i * b);
  const size_t begin = within * b / 8;  // the rest begins in the last seven bytes
  std::array<char, 16> rest{};
  if (within < count) std::memcpy(rest.data(), data + begin, size - begin);
  for (size_t i = within; i < count; ++i) out[i] = read(rest.data(), i * b - begin * 8);
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_BIT_PACKING_H_
