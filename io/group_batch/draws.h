// Random numbers, each of which can be computed without the others. The orders of an epoch are
// drawn from them.
//
// The draws come from a counter, not from a generator with a state: draw i is SplitMix64(key + i *
// odd), a splitmix64 sequence whose key is mixed from the two seed words. So draw i needs none of
// the earlier draws, and one seed gives one order on every machine. Seeds that differ in one bit,
// such as (seed, epoch) and (seed, epoch + 1), give unrelated orders. A draw below n is the high
// word of draw * n: its bias is n / 2^64.

#ifndef GMETA_IO_GROUP_BATCH_DRAWS_H_
#define GMETA_IO_GROUP_BATCH_DRAWS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/common/splitmix.h"

namespace gmeta::group_batch {

struct Seed {
  int64_t first = 0;
  int64_t second = 0;
};

class Draws {
 public:
  // `stream` separates different uses of one seed.
  Draws(Seed seed, uint64_t stream)
      : key_(SplitMix64(static_cast<uint64_t>(seed.first) +
                        SplitMix64(static_cast<uint64_t>(seed.second) + SplitMix64(stream)))) {}

  // Returns the next draw, uniform in [0, n).
  size_t Below(size_t n) {
    const uint64_t draw = SplitMix64(key_ + ++count_ * kSplitMixOdd);
    return static_cast<size_t>((static_cast<unsigned __int128>(draw) * n) >> 64);
  }

 private:
  const uint64_t key_;
  uint64_t count_ = 0;
};

// Permutes the items (Fisher and Yates): every order is equally likely.
template <typename T>
void Permute(Draws draws, std::vector<T>* items) {
  for (size_t left = items->size(); left > 1; --left) {
    std::swap((*items)[left - 1], (*items)[draws.Below(left)]);
  }
}

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_DRAWS_H_
