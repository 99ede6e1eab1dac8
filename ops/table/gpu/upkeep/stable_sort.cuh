// Sorts numbers by keys on the GPU, by CUB. Equal keys keep their order.

#ifndef GMETA_OPS_TABLE_GPU_UPKEEP_STABLE_SORT_CUH_
#define GMETA_OPS_TABLE_GPU_UPKEEP_STABLE_SORT_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "ops/common/gpu/cuda_error.cuh"

namespace gmeta {

// The bytes of workspace that StableSort needs.
template <class Key>
size_t StableSortBytes(size_t count) {
  const Key* const keys = nullptr;
  const uint32_t* const numbers = nullptr;
  size_t bytes = 0;
  CheckCuda(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, static_cast<Key*>(nullptr),
                                            numbers, static_cast<uint32_t*>(nullptr), count),
            "sizing a sort");
  return bytes;
}

// Sorts by the lowest `bits` bits of the keys.
template <class Key>
void StableSort(void* workspace, size_t bytes, const Key* keys, Key* sorted_keys,
                const uint32_t* numbers, uint32_t* sorted_numbers, size_t count, int bits,
                cudaStream_t stream) {
  CheckCuda(cub::DeviceRadixSort::SortPairs(workspace, bytes, keys, sorted_keys, numbers,
                                            sorted_numbers, count, 0, bits, stream),
            "sorting");
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_UPKEEP_STABLE_SORT_CUH_
