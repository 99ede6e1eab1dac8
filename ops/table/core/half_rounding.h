// Rounding of an optimizer's step on a half row when it is stored: to nearest, or at random, up or
// down with probabilities whose mean is the number itself. Rounded to nearest, a step below half a
// unit in the last place is lost each time; at random, many such steps add up, with noise.
//
// Random numbers
//   Each number of a row has 16 random bits, a pure function of (table seed, key, step, column). So
//   runs repeat, whatever the threads, tiers, ranks and devices. A row's columns are those of its
//   weights, and each slot has as many (or one, of a slot for the whole row). The four columns from
//   4 * b on have, under the seed, the Philox words of these counters:
//
//     (b,        step, key)   lower half: weights; upper half: first slot
//     (b + 2^31, step, key)   lower half: second slot
//
//   Steps count from 1, so these aren't the counters of initial rows (initializer.h).
//
// New rows, imported rows and rows that have cooled down (half_rule.h) are rounded to nearest.

#ifndef GMETA_OPS_TABLE_CORE_HALF_ROUNDING_H_
#define GMETA_OPS_TABLE_CORE_HALF_ROUNDING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/common/halves/half.h"
#include "ops/common/halves/half_number.h"
#include "ops/common/host_device.h"
#include "ops/common/philox.h"
#include "ops/common/vector_target.h"

namespace gmeta {

// Rounds n numbers at random, number i by the bits of words[i] from bit `shift` on.
GMETA_ALWAYS_INLINE void DrawHalvesLoop(const float* from, const uint32_t* words, int shift,
                                        size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = portable::DrawHalf(from[i], words[i] >> shift & 0xffff);
}
GMETA_ALWAYS_INLINE void DrawBfloatsLoop(const float* from, const uint32_t* words, int shift,
                                         size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = portable::DrawBfloat(from[i], words[i] >> shift & 0xffff);
}
GMETA_VECTOR_VERSIONS(DrawHalves, DrawHalvesLoop,
                      (const float* from, const uint32_t* words, int shift, size_t n, uint16_t* to),
                      (from, words, shift, n, to))
GMETA_VECTOR_VERSIONS(DrawBfloats, DrawBfloatsLoop,
                      (const float* from, const uint32_t* words, int shift, size_t n, uint16_t* to),
                      (from, words, shift, n, to))

struct HalfRounding {
  static constexpr uint32_t kSecondSlot = uint32_t{1} << 31;

  bool at_random = false;
  uint64_t seed = 0;

  GMETA_HOST_DEVICE static PhiloxCounter CounterOf(uint32_t block, int64_t key, uint32_t step) {
    const uint64_t bits = static_cast<uint64_t>(key);
    return {{block, step, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}};
  }

  // Rounds a row of `dim` weights and `slot_floats` slots. For the CPU.
  void Round(int64_t key, uint32_t step, const float* weights, size_t dim, const float* slots,
             size_t slot_floats, uint16_t* to_weights, uint16_t* to_slots) const {
    if (!at_random) {
      ToHalves(weights, dim, to_weights);
      ToBfloats(slots, slot_floats, to_slots);
      return;
    }
    constexpr size_t kPiece = 128;
    static_assert(kPiece % 32 == 0);  // PhiloxStream may write a few more words
    uint32_t words[kPiece];
    const auto draw_slots = [&](size_t first, size_t most, int shift) {
      const size_t n = first < slot_floats ? std::min(most, slot_floats - first) : 0;
      DrawBfloats(slots + first, words, shift, n, to_slots + first);
    };
    for (size_t start = 0; start < dim; start += kPiece) {
      const size_t n = std::min(kPiece, dim - start);
      const auto block = static_cast<uint32_t>(start / 4);
      PhiloxStream(seed, CounterOf(block, key, step), n, words);
      DrawHalves(weights + start, words, 0, n, to_weights + start);
      draw_slots(start, n, 16);
      if (slot_floats <= dim) continue;
      PhiloxStream(seed, CounterOf(block | kSecondSlot, key, step), n, words);
      draw_slots(dim + start, n, 0);
    }
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_HALF_ROUNDING_H_
