// Weights: the exponentials of siblings' logits, by the same operations on the CPU and on the GPU,
// and so with the same bits (ops/common/exponential.h).
//
// The weight of a child is e^(its logit - the greatest sibling's), and 0 if that is below e^-87.
// The logarithm of their sum is rounded from double precision. So the libraries' logarithms, which
// differ in the last bit of a double, give different floats fewer than once in 10^8 times.
//
// To draw by weights, they are made whole numbers, whose sums don't depend on the order: multiplied
// by 2^(62 - b), b being the number of bits of the number of siblings, and rounded down. Of 256
// siblings those of a weight below 2^-53 get nothing.

#ifndef GMETA_OPS_TRIE_WEIGHTS_H_
#define GMETA_OPS_TRIE_WEIGHTS_H_

#include <cmath>
#include <cstdint>

#include "ops/common/exponential.h"
#include "ops/common/host_device.h"

namespace gmeta::trie {

inline constexpr float kFar = -87.0f;

// `below` is a logit less the greatest.
GMETA_HOST_DEVICE inline float Weight(float below) {
  return below < kFar ? 0.0f : Exponential<float, uint32_t>(below);
}

GMETA_HOST_DEVICE inline float LogOfSum(float sum) {
  return static_cast<float>(std::log(static_cast<double>(sum)));
}

class WholeWeights {
 public:
  explicit GMETA_HOST_DEVICE WholeWeights(uint64_t siblings) {
    int bits = 0;
    for (; siblings != 0; siblings /= 2) ++bits;
    unit_ = static_cast<float>(uint64_t{1} << (62 - bits));
  }
  GMETA_HOST_DEVICE uint64_t Of(float weight) const {
    return static_cast<uint64_t>(static_cast<int64_t>(weight * unit_));
  }

 private:
  float unit_;
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_WEIGHTS_H_
