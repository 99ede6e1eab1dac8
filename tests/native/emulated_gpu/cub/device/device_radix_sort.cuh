// CUB's sort, by the standard library's.

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace cub {

struct DeviceRadixSort {
  template <class Key, class Value>
  static cudaError_t SortPairs(void* space, size_t& bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, size_t count,
                               int /*first_bit*/ = 0, int /*last_bit*/ = 64,
                               cudaStream_t /*stream*/ = nullptr) {
    if (space == nullptr) {
      bytes = 1;
      return cudaSuccess;
    }
    std::vector<std::pair<Key, Value>> pairs(count);
    for (size_t i = 0; i < count; ++i) pairs[i] = {keys[i], values[i]};
    std::stable_sort(pairs.begin(), pairs.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < count; ++i) {
      sorted_keys[i] = pairs[i].first;
      sorted_values[i] = pairs[i].second;
    }
    return cudaSuccess;
  }
};

}  // namespace cub

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_
