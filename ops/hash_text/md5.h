// The number of a text: the last 8 bytes of its MD5, little endian, as a signed integer. For text
// ids `gmeta prepare` stores this number, and DuckDB calls it md5_number_lower, so an id has the
// same number wherever it is hashed.
//
// MD5 (RFC 1321) is chosen because every engine and language has it, not for secrecy. A text is cut
// into blocks of 64 bytes, the last one filled up with a 1 bit, zeros, and the length in bits. Four
// words of 32 bits go through 64 steps a block. Each step depends on the previous one, so nothing
// can be vectorized within a text. An id of up to 55 bytes is one block: about 300 instructions,
// with the steps unrolled and the shifts constants. The state never leaves registers, and only the
// last block is copied, to be filled up.

#ifndef GMETA_OPS_HASH_TEXT_MD5_H_
#define GMETA_OPS_HASH_TEXT_MD5_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace gmeta {
namespace md5 {

// floor(2^32 * |sin(i + 1)|).
inline constexpr uint32_t kSines[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};
inline constexpr int kShifts[4][4] = {
    {7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}};

struct State {
  uint32_t a = 0x67452301, b = 0xefcdab89, c = 0x98badcfe, d = 0x10325476;
};

template <size_t kStep>
inline void Step(State& s, const uint32_t* words) {
  constexpr size_t kRound = kStep / 16;
  constexpr int kShift = kShifts[kRound][kStep % 4];
  constexpr size_t kWord = (kRound == 0   ? kStep
                            : kRound == 1 ? 5 * kStep + 1
                            : kRound == 2 ? 3 * kStep + 5
                                          : 7 * kStep) %
                           16;
  uint32_t mixed;
  if constexpr (kRound == 0) mixed = (s.b & s.c) | (~s.b & s.d);
  if constexpr (kRound == 1) mixed = (s.d & s.b) | (~s.d & s.c);
  if constexpr (kRound == 2) mixed = s.b ^ s.c ^ s.d;
  if constexpr (kRound == 3) mixed = s.c ^ (s.b | ~s.d);
  const uint32_t sum = s.a + mixed + kSines[kStep] + words[kWord];
  s = {s.d, s.b + (sum << kShift | sum >> (32 - kShift)), s.b, s.c};
}

template <size_t... kStep>
inline void Steps(State& s, const uint32_t* words, std::index_sequence<kStep...>) {
  (Step<kStep>(s, words), ...);
}

// Processes a `block` of 64 bytes. Words are little endian, like the processors that this is built
// for.
inline void Take(State* state, const char* block) {
  uint32_t words[16];
  std::memcpy(words, block, sizeof(words));
  State s = *state;
  Steps(s, words, std::make_index_sequence<64>());
  *state = {state->a + s.a, state->b + s.b, state->c + s.c, state->d + s.d};
}

}  // namespace md5

inline int64_t HashText(const char* text, size_t size) {
  md5::State state;
  const size_t whole = size / 64 * 64, rest = size - whole;
  for (size_t at = 0; at < whole; at += 64) md5::Take(&state, text + at);
  char last[128] = {};
  if (rest > 0) std::memcpy(last, text + whole, rest);
  last[rest] = static_cast<char>(0x80);
  const size_t end = rest < 56 ? 64 : 128;
  const uint64_t bits = uint64_t{8} * size;
  std::memcpy(last + end - sizeof(bits), &bits, sizeof(bits));
  for (size_t at = 0; at < end; at += 64) md5::Take(&state, last + at);
  return static_cast<int64_t>(uint64_t{state.d} << 32 | state.c);
}

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TEXT_MD5_H_
