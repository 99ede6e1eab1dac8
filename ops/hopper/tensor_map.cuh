// Describes a tensor in device memory for the copy engine.

#ifndef GMETA_OPS_HOPPER_TENSOR_MAP_CUH_
#define GMETA_OPS_HOPPER_TENSOR_MAP_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ops/hopper/wgmma.cuh"

namespace gmeta::hopper {

// Returns the driver's function that encodes a map. The driver is queried at run time, so that
// nothing links to it.
inline auto TensorMapEncoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                                12000, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(found)
               : nullptr;
  }();
  return encode;
}

// Describes a (tokens, heads, width) tensor of T, whose tokens are `token_stride` numbers apart and
// whose heads `head_stride`. Boxes are `rows` tokens of a head by kBoxWidth numbers. Tokens past
// the last read as zeros. Returns false if the driver refuses.
template <class T>
bool MakeTensorMap(CUtensorMap* map, const void* data, int64_t tokens, int64_t heads, int64_t width,
                   int64_t token_stride, int64_t head_stride, int rows) {
  const auto encode = TensorMapEncoder();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(head_stride) * sizeof(T),
                                static_cast<cuuint64_t>(token_stride) * sizeof(T)};
  const cuuint32_t box[] = {kBoxWidth, 1, static_cast<cuuint32_t>(rows)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUtensorMapDataType type = std::is_same_v<T, __nv_bfloat16>
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_TENSOR_MAP_CUH_
