// The checksum of a history: what a reader has rebuilt is compared with what the ranker saw.
//
// It is the CRC-32C of the history's columns, one after another, in the order in which they are
// named; each value is a word of 64 bits, little end first, and a float is its bits with 32 zero
// bits above:
//
//     item [7, 9], price [.5, 2.]     words 7, 9, 0x3f000000, 0x40000000
//
// The columns' names and lengths aren't in it: both sides name the same columns, and a history's
// columns have one length. A history without events has the checksum 0. Integers are already words
// in memory, so the CRC reads them in place; floats are widened in pieces that stay in the first
// cache.

#ifndef GMETA_IO_HISTORY_HISTORY_CRC_H_
#define GMETA_IO_HISTORY_HISTORY_CRC_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ops/common/crc32c.h"

namespace gmeta::history {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read where they lie");

// Extends `before`, the CRC of earlier values, by these values.
inline uint32_t CrcOfValues(const int64_t* values, size_t count, uint32_t before) {
  return Crc32c(reinterpret_cast<const char*>(values), count * sizeof(int64_t), before);
}

inline uint32_t CrcOfValues(const float* values, size_t count, uint32_t before) {
  std::array<int64_t, 256> words;
  for (size_t begin = 0; begin < count; begin += words.size()) {
    const size_t size = std::min(words.size(), count - begin);
    for (size_t i = 0; i < size; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + begin + i, sizeof(bits));
      words[i] = static_cast<int64_t>(bits);
    }
    before = CrcOfValues(words.data(), size, before);
  }
  return before;
}

// Adds one column of histories to their checksums, which are 0 before the first column.
//
// Args:
//   row_splits: One more than there are histories; history i has the values from row_splits[i] to
//     row_splits[i + 1] - 1.
//   crcs: A checksum for each history.
template <class T>
void AddColumn(const T* values, const int64_t* row_splits, size_t histories, int64_t* crcs) {
  for (size_t i = 0; i < histories; ++i) {
    const auto count = static_cast<size_t>(row_splits[i + 1] - row_splits[i]);
    crcs[i] = CrcOfValues(values + row_splits[i], count, static_cast<uint32_t>(crcs[i]));
  }
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_HISTORY_CRC_H_
