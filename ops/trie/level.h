// A level of a trie of codes, and the beams that stand on it: what the CPU's code and the GPU's
// share.
//
// A level is two arrays (gmeta/models/generative/code_tables.py): the children of node i are the
// nodes starts[i] to starts[i + 1] - 1 of the next level, and digits[c] is the last digit of child
// c. `allowed`, if given, says which children lead to an allowed item. A beam is a node and a
// score, the log of its probability.

#ifndef GMETA_OPS_TRIE_LEVEL_H_
#define GMETA_OPS_TRIE_LEVEL_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta::trie {

// A level: from `nodes` nodes to `children` of the next.
struct Level {
  const int64_t* starts;  // nodes + 1
  const int32_t* digits;
  const bool* allowed;  // or null
  int64_t nodes, children;
  const int64_t* wide_digits = nullptr;  // in place of digits, which are null then

  int32_t Digit(int64_t child) const {
    return wide_digits == nullptr ? digits[child] : Narrow(wide_digits[child]);
  }
  // A digit, or -1 if it is too large for one.
  static GMETA_HOST_DEVICE int32_t Narrow(int64_t digit) {
    return digit < 0 || digit > INT32_MAX ? -1 : static_cast<int32_t>(digit);
  }
};

// The beams of a user: where a node is below 0, there is no beam.
struct Beams {
  const float* logits;  // beams x codes
  const float* scores;
  const int64_t* nodes;
  size_t beams, codes;
};

// Where the next beams go, k each. If there are fewer, the last have node -1, beam -1, and a score
// and a rank of minus infinity.
struct NextBeams {
  float* scores;
  int64_t* nodes;
  int32_t* beams;
  float* ranks = nullptr;  // or null
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_LEVEL_H_
