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

#include "ops/common/vector_target.h"

namespace gmeta::history {

inline constexpr int kWidestLoad = 56;

inline bool IsWidth(uint64_t width) { return width <= kWidestLoad || width == 64; }

// Returns the number of bits of the number, 0 for 0.
inline int BitLength(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

// Returns the width in which numbers of so many bits are stored.
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
  int bits = 0;  // of `waiting`, below 64
  for (size_t i = 0; i < count; ++i) {
    const uint64_t number = LowBits(numbers[i], width);
    waiting |= number << bits;
    bits += width;
    if (bits < 64) continue;
    std::memcpy(out, &waiting, sizeof(waiting));
    out += sizeof(waiting);
    bits -= 64;
    waiting = number >> (width - bits);
  }
  if (bits > 0) std::memcpy(out, &waiting, static_cast<size_t>(bits + 7) / 8);
}

inline uint64_t LoadWord(const char* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// Reads numbers of `b` bits, 1 to kWidestLoad, that begin at least eight bytes before the end. Four
// are shifted and masked at once. Each group of four begins a constant number of bits after the
// previous one, so each eight begin at the same bits of their bytes as the previous eight.
GMETA_ALWAYS_INLINE void UnpackFours(const char* data, size_t count, size_t b, uint64_t* out) {
  using Four = uint64_t __attribute__((vector_size(32)));
  const uint64_t mask = (uint64_t{1} << b) - 1;
  const Four masks = {mask, mask, mask, mask};
  std::array<size_t, 8> at;
  std::array<uint64_t, 8> shift;
  for (size_t i = 0; i < 8; ++i) {
    at[i] = i * b / 8;
    shift[i] = i * b % 8;
  }
  const Four low = {shift[0], shift[1], shift[2], shift[3]};
  const Four high = {shift[4], shift[5], shift[6], shift[7]};
  size_t i = 0;
  for (; i + 8 <= count; i += 8, data += b) {
    const Four first = {LoadWord(data + at[0]), LoadWord(data + at[1]), LoadWord(data + at[2]),
                        LoadWord(data + at[3])};
    const Four second = {LoadWord(data + at[4]), LoadWord(data + at[5]), LoadWord(data + at[6]),
                         LoadWord(data + at[7])};
    const Four found[2] = {(first >> low) & masks, (second >> high) & masks};
    std::memcpy(out + i, found, sizeof(found));
  }
  for (size_t k = 0; i < count; ++i, ++k) out[i] = (LoadWord(data + at[k]) >> shift[k]) & mask;
}

GMETA_VECTOR_VERSIONS(UnpackWithin, UnpackFours,
                      (const char* data, size_t count, size_t b, uint64_t* out),
                      (data, count, b, out))

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
  const size_t size = PackedSize(count, width);
  // Those that begin at least eight bytes before the end.
  const size_t within = size < 8 ? 0 : std::min(count, ((size - 8) * 8 + 7) / b + 1);
  UnpackWithin(data, within, b, out);
  const size_t begin = within * b / 8;  // the rest begins in the last seven bytes
  std::array<char, 16> rest{};
  if (within < count) std::memcpy(rest.data(), data + begin, size - begin);
  for (size_t i = within; i < count; ++i) {
    out[i] = LowBits(LoadWord(rest.data() + (i * b / 8 - begin)) >> (i * b % 8), width);
  }
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_BIT_PACKING_H_
