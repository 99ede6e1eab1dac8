// GumbelRank: the rank of a child in a stochastic beam search (Kool, van Hoof and Welling,
// "Stochastic beams and where to find them", ICML 2019, algorithm 1), which draws items without
// replacement, each next one by the probabilities of those that are left.
//
// A beam of rank G has children of scores s(c), the logs of their probabilities, and noise g(c) of
// a Gumbel distribution (noise.h). With p(c) = s(c) + g(c) and Z the greatest p, child c has the
// rank
//
//   -log(exp(-G) - exp(-Z) + exp(-p(c)))
//
// which is a Gumbel variable about s(c) under the condition that the greatest of them is G. It is
// computed by the formula of the paper's appendix B.3, which loses no digits, in double precision,
// by the same operations on the CPU and on the GPU. Their libraries' exponentials and logarithms
// differ in the last bits, which rarely changes a rank's float: if each has a random error of one
// unit in the last place, fewer than one rank in 10^8 is another float, the next one.

#ifndef GMETA_OPS_TRIE_GUMBEL_RANK_H_
#define GMETA_OPS_TRIE_GUMBEL_RANK_H_

#include <cmath>

#include "ops/common/host_device.h"

namespace gmeta::trie {

// log(1 - exp(x)), x <= 0.
GMETA_HOST_DEVICE inline double Log1MinusExp(double x) {
  return x > -0.69314718055994531 ? std::log(-std::expm1(x)) : std::log1p(-std::exp(x));
}

// `top` is G, `noisy` p(c), and `most` Z. At most `top`.
GMETA_HOST_DEVICE inline float GumbelRank(float top, double noisy, double most) {
  if (!(noisy > -INFINITY)) return -INFINITY;
  const double of_beam = top;
  const double v = of_beam - noisy + Log1MinusExp(noisy - most);
  const double rank = of_beam - (v > 0.0 ? v : 0.0) - std::log1p(std::exp(-std::abs(v)));
  return static_cast<float>(rank < of_beam ? rank : of_beam);
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GUMBEL_RANK_H_
