// Compares the nine one-byte tags of a group at once. Each function returns a mask whose bit i
// stands for slot i. A tag is 0 (empty) or has its top bit set (full). The 16 bytes from the first
// tag on must be readable; those after the tags have no influence.
//
// Two forms: SSE2, which every x86-64 has, and plain 64-bit arithmetic ("SIMD within a register")
// for all others; a native test checks that they agree.

#ifndef GMETA_OPS_TABLE_CORE_INDEX_TAG_MATCH_H_
#define GMETA_OPS_TABLE_CORE_INDEX_TAG_MATCH_H_

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gmeta {

inline constexpr int kTagWidth = 9;
inline constexpr uint32_t kAllSlots = (1u << kTagWidth) - 1;

namespace portable {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "slot i is byte i, counted from the low end");

inline constexpr uint64_t kHighBits = 0x8080808080808080ULL;

// The first eight; each function takes the ninth on its own.
inline uint64_t LoadTags(const uint8_t* tags) {
  uint64_t word;
  std::memcpy(&word, tags, sizeof word);
  return word;
}

// Gathers the top bit of each byte into the low eight bits.
inline uint32_t MoveMask(uint64_t word) {
  return static_cast<uint32_t>(((word & kHighBits) >> 7) * 0x0102040810204080ULL >> 56);
}

inline uint32_t MatchTag(const uint8_t* tags, uint8_t tag) {
  const uint64_t difference = LoadTags(tags) ^ (tag * 0x0101010101010101ULL);
  // The top bit of a byte of `nonzero` is set if that byte differs from the tag. The addition can't
  // carry from one byte to the next.
  const uint64_t nonzero = ((difference & ~kHighBits) + ~kHighBits) | difference;
  return MoveMask(~nonzero) | static_cast<uint32_t>(tags[8] == tag) << 8;
}

inline uint32_t MatchFull(const uint8_t* tags) {
  return MoveMask(LoadTags(tags)) | static_cast<uint32_t>(tags[8] >> 7) << 8;
}

}  // namespace portable

#if defined(__SSE2__)

inline __m128i LoadTags(const uint8_t* tags) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
}

inline uint32_t MatchTag(const uint8_t* tags, uint8_t tag) {
  const __m128i equal = _mm_cmpeq_epi8(LoadTags(tags), _mm_set1_epi8(static_cast<char>(tag)));
  return static_cast<uint32_t>(_mm_movemask_epi8(equal)) & kAllSlots;
}

inline uint32_t MatchFull(const uint8_t* tags) {
  return static_cast<uint32_t>(_mm_movemask_epi8(LoadTags(tags))) & kAllSlots;
}

#else

using portable::MatchFull;
using portable::MatchTag;

#endif

inline uint32_t MatchEmpty(const uint8_t* tags) { return ~MatchFull(tags) & kAllSlots; }

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_INDEX_TAG_MATCH_H_
