// Noise: the random numbers of a search, which are functions of what they are drawn for. So they
// depend neither on a user's batch nor on threads, ranks, a restart or the device.
//
// The words are those of Philox4x32-10 (ops/common/philox.h) with
//
//   key      SplitMix64(seed) + step, modulo 2^64
//   counter  index mod 2^32
//            kind * 2^31 + level * 2^16 + index / 2^32
//            the user's key, its lower half and its upper
//
// Below(b, total), the draw of beam b, has kind 0 and index b. It is n * total / 2^64, rounded
// down, n being words 0 and 1, word 0 the upper half.
//
// Gumbel(c), the noise of child c, has kind 1 and index c / 4. It is -log(-log u), u being
// (w + 1/2) / 2^32 and w word c mod 4, so it lies between -3.2 and 22.9. Its logarithms are the
// library's: of the CPU and of the GPU, they differ in the last bits of a double.

#ifndef GMETA_OPS_TRIE_NOISE_H_
#define GMETA_OPS_TRIE_NOISE_H_

#include <cmath>
#include <cstdint>

#include "ops/common/host_device.h"
#include "ops/common/philox.h"
#include "ops/common/splitmix.h"
#include "ops/trie/level.h"

namespace gmeta::trie {

inline constexpr int64_t kMostLevels = 1 << 15;

class Noise {
 public:
  GMETA_HOST_DEVICE Noise(uint64_t seed, uint64_t step, uint32_t level, uint64_t user)
      : key_(SplitMix64(seed) + step), level_(level), user_(user) {}

  GMETA_HOST_DEVICE uint64_t Below(uint64_t beam, uint64_t total) const {
    uint32_t words[4];
    Draw(0, beam, words);
    const uint64_t n = uint64_t{words[0]} << 32 | words[1];
    return static_cast<uint64_t>(static_cast<unsigned __int128>(n) * total >> 64);
  }

  GMETA_HOST_DEVICE double Gumbel(int64_t child) {
    const uint64_t index = static_cast<uint64_t>(child) / 4;
    if (index != drawn_) Draw(1, drawn_ = index, words_);
    return -std::log(-std::log((static_cast<double>(words_[child % 4]) + 0.5) * 0x1p-32));
  }

 private:
  GMETA_HOST_DEVICE void Draw(uint32_t kind, uint64_t index, uint32_t words[4]) const {
    Philox4x32<1>(key_,
                  {{static_cast<uint32_t>(index),
                    kind << 31 | level_ << 16 | static_cast<uint32_t>(index >> 32),
                    static_cast<uint32_t>(user_), static_cast<uint32_t>(user_ >> 32)}},
                  words);
  }

  const uint64_t key_;
  const uint32_t level_;
  const uint64_t user_;
  uint64_t drawn_ = UINT64_MAX;
  uint32_t words_[4];
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_NOISE_H_
