// SiLU(x) = x / (1 + exp(-x)) of parts of rows, and its gradient, which overwrites the gradient of
// SiLU(x): passes at the memory's pace. Attention's kernels could apply SiLU's gradient as they
// write, but on an H200 that takes longer than a pass: their writes would wait for the values of x,
// and they have no registers left to load x early.

#ifndef GMETA_OPS_LAYER_SILU_CUH_
#define GMETA_OPS_LAYER_SILU_CUH_

#include <cstdint>

#include "ops/layer/activation.cuh"
#include "ops/layer/eight.cuh"

namespace gmeta::hstu {

// Computes SiLU of `width` numbers, a multiple of 8, of each row.
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

// Replaces of_y, (rows, width) with a stride, by the gradient of x.
template <class T>
__global__ void SiluRowsBack(const T* x, int64_t x_stride, int64_t rows, int width, T* of_y,
                             int64_t of_y_stride) {
  const int pieces = width / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < rows * pieces;
       i += step) {
    const int64_t row = i / pieces, column = i % pieces * 8;
    const Eight<T> from = Eight<T>::Load(x + row * x_stride + column);
    T* const gradient = of_y + row * of_y_stride + column;
    const Eight<T> of = Eight<T>::Load(gradient);
    float to[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = SiluGradient(of.at(j), from.at(j));
    Eight<T>::Store(to, gradient);
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_SILU_CUH_
