// A level of a trie with random children, as the CPU's code and the GPU's take it.

#ifndef GMETA_TESTS_NATIVE_RANDOM_TRIE_LEVEL_H_
#define GMETA_TESTS_NATIVE_RANDOM_TRIE_LEVEL_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "ops/trie/gpu/trie_abi.h"
#include "ops/trie/level.h"

// A level of random children, some of which may not come out.
struct RandomLevel {
  std::vector<int64_t> starts{0};
  std::vector<int32_t> digits;
  std::vector<int64_t> wide_digits;  // half of the levels give these
  std::unique_ptr<bool[]> allowed;

  RandomLevel(int64_t nodes, int32_t codes, uint32_t one_of, bool masks, std::mt19937* random) {
    for (int64_t i = 0; i < nodes; ++i) {
      for (int32_t code = 0; code < codes; ++code) {
        if ((*random)() % one_of == 0) digits.push_back(code);
      }
      starts.push_back(static_cast<int64_t>(digits.size()));
    }
    if ((*random)() % 2 == 0) wide_digits.assign(digits.begin(), digits.end());
    if (!masks) return;
    allowed.reset(new bool[digits.size() + 1]);
    for (size_t i = 0; i < digits.size(); ++i) allowed[i] = (*random)() % 4 != 0;
  }
  int64_t nodes() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t children() const { return static_cast<int64_t>(digits.size()); }
  gmeta::trie::Level OnCpu() const {
    return {starts.data(), digits.data(), allowed.get(), nodes(), children()};
  }
  GmetaTrieLevel OnGpu() const {
    const auto* const may = reinterpret_cast<const uint8_t*>(allowed.get());
    if (!wide_digits.empty()) {
      return {starts.data(), nullptr, may, nodes(), children(), wide_digits.data()};
    }
    return {starts.data(), digits.data(), may, nodes(), children(), nullptr};
  }
};

#endif  // GMETA_TESTS_NATIVE_RANDOM_TRIE_LEVEL_H_
