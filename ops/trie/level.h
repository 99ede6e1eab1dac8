// A level of a trie of codes, and the beams that stand on it: what the CPU's code and the GPU's
// share.
//
// A level is two arrays (gmeta/core/data/code_trie.py): the children of node i are the nodes
// starts[i] to starts[i + 1] - 1 of the next level, and digits[c] is the last digit of child c.
// `allowed`, if given, says which children lead to an item that may come out. A beam is a node and
// a score, the log of its probability.

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
};

// The beams of a user: nodes below 0 are of no beam.
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

GMETA_HOST_DEVICE inline uint64_t SplitMix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_LEVEL_H_
