// In place of ops/hopper/tensor_map.cuh: maps for CopyBox of the emulated hopper.cuh.

#ifndef GMETA_OPS_HOPPER_TENSOR_MAP_CUH_
#define GMETA_OPS_HOPPER_TENSOR_MAP_CUH_

#include "ops/hopper/wgmma.cuh"

namespace gmeta::hopper {

template <class T>
bool MakeTensorMap(CUtensorMap* map, const void* data, int64_t tokens, int64_t heads, int64_t width,
                   int64_t token_stride, int64_t head_stride, int rows) {
  *map = {const_cast<char*>(static_cast<const char*>(data)),
          {width, heads, tokens},
          {2, 2 * head_stride, 2 * token_stride},
          rows};
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token_stride % 8 == 0;
}

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_TENSOR_MAP_CUH_
