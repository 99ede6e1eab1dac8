// SiLU of parts of rows.

#ifndef GMETA_OPS_HSTU_LAYER_SILU_CUH_
#define GMETA_OPS_HSTU_LAYER_SILU_CUH_

#include <cstdint>

#include "ops/common/eight.cuh"
#include "ops/hstu_attention/activation.cuh"

namespace gmeta::hstu {

// `width` numbers, a multiple of 8, of each row.
template <class T>
__global__ void SiluRows(const T* x, int64_t x_stride, int64_t rows, int width, T* y,
                         int64_t y_stride) {
  const int pieces = width / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < rows * pieces;
       i += step) {
    const int64_t row = i / pieces, column = i % pieces * 8;
    const Eight<T> from = Eight<T>::Load(x + row * x_stride + column);
    float to[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = Silu(from.at(j));
    Eight<T>::Store(to, y + row * y_stride + column);
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_HSTU_LAYER_SILU_CUH_
