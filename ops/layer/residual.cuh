// y = x + (change + offset), and sums of columns, the gradient of the offset.
//
// Both read their input once, 16 bytes a thread at a time. TensorFlow makes two passes for the
// first, and its sums of columns leave an H200's memory idle nearly all of the time.
//
// Sums are in float32, in one order: a thread's rows, the threads of a block, the blocks. So they
// are the same to the last bit in each run and on each GPU.

#ifndef GMETA_OPS_LAYER_RESIDUAL_CUH_
#define GMETA_OPS_LAYER_RESIDUAL_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/layer/eight.cuh"

namespace gmeta::hstu {

inline constexpr int kResidualThreads = 256;
inline constexpr int kSumBlocks = 128;   // blocks for each tile of columns
inline constexpr int kSumColumns = 256;  // columns of a tile: eight for each thread of a warp
inline constexpr int kSumRows = 8;       // rows at a time, one for each warp
inline constexpr int kSumUnrolled = 4;   // rows that a thread loads at once

// Computes y for (rows, width) without gaps, width a multiple of 8, rounded once. A null x or
// offset counts as 0.
template <class T>
__global__ void AddRows(const T* x, const T* change, const T* offset, int64_t rows, int width,
                        T* y) {
  const int pieces = width / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < rows * pieces;
       i += step) {
    const Eight<T> b = Eight<T>::Load(change + 8 * i);
    Eight<T> a{}, c{};
    if (x != nullptr) a = Eight<T>::Load(x + 8 * i);
    if (offset != nullptr) c = Eight<T>::Load(offset + i % pieces * 8);
    float to[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = a.at(j) + (b.at(j) + c.at(j));
    Eight<T>::Store(to, y + 8 * i);
  }
}

// Computes a block's part of the sums of a tile of columns. `sums` is (kSumBlocks, width).
template <class T>
__global__ void SumRows(const T* x, int64_t rows, int width, float* sums) {
  __shared__ float of_warp[kSumRows][kSumColumns];
  const int tiles = (width + kSumColumns - 1) / kSumColumns;
  const int part = blockIdx.x / tiles, warp = threadIdx.x / 32, own = threadIdx.x % 32 * 8;
  const int column = blockIdx.x % tiles * kSumColumns + own;
  constexpr int64_t kStep = kSumBlocks * kSumRows;
  float sum[8] = {};
  if (column < width) {
    for (int64_t row = part * kSumRows + warp; row < rows; row += kSumUnrolled * kStep) {
      Eight<T> eight[kSumUnrolled];
#pragma unroll
      for (int i = 0; i < kSumUnrolled; ++i) {
        eight[i] = {};
        if (row + i * kStep < rows)
          eight[i] = Eight<T>::Load(x + (row + i * kStep) * width + column);
      }
#pragma unroll
      for (int i = 0; i < kSumUnrolled; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += eight[i].at(j);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) of_warp[warp][own + j] = sum[j];
  __syncthreads();
  const int at = blockIdx.x % tiles * kSumColumns + static_cast<int>(threadIdx.x);
  if (at >= width) return;
  float whole = 0.0f;
#pragma unroll
  for (int i = 0; i < kSumRows; ++i) whole += of_warp[i][threadIdx.x];
  sums[static_cast<int64_t>(part) * width + at] = whole;
}
static_assert(kResidualThreads == kSumColumns && kResidualThreads == 32 * kSumRows);

// Adds up the blocks' parts.
template <class T>
__global__ void SumParts(const float* sums, int width, T* to) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (column >= width) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < kSumBlocks; ++i) sum += sums[static_cast<int64_t>(i) * width + column];
  to[column] = static_cast<T>(sum);
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_RESIDUAL_CUH_
