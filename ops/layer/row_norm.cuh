// Layer norm of rows, together with the gate of an HSTU layer, in one pass over memory in each
// direction.
//
//   n = (x - mean(x)) / sqrt(var(x) + epsilon) [* scale + offset]        y = n [* SiLU(gate)]
//
// Layout. Rows have up to 4,096 numbers of T, a multiple of 8, and may be parts of longer ones
// (strides). kWarps warps process a row; each of their threads holds kChunks pieces of 8
// neighbours, 16 bytes, in float32. Threads keep their columns from row to row.
//
// Operations. Forward reads x and the gate and writes y, the mean and 1 / deviation. Backward reads
// the same inputs as forward, its statistics and y's gradient g, and writes
//
//   of gate   g n SiLU'(gate)
//   of n      h = g SiLU(gate) scale
//   of x      (h - mean(h) - c mean(h c)) / deviation,    c = (x - mean(x)) / deviation
//   of scale  sum over rows of g SiLU(gate) c             of offset: of g SiLU(gate)
//
// Each group of warps sums the last two over its rows, in registers; each block sums them over its
// groups; and a second launch sums them over blocks.
//
// Invariants. The number of groups is a constant, so the order of all sums is too: results are the
// same to the last bit in each run. All arithmetic is in float32. The variance comes from
// differences to the mean, never from a difference of squares.
//
// Why it is fast. Its cost is its memory traffic alone: each number once, 16 bytes a thread. Made
// of a framework's ops, the same takes ten passes forward and twenty backward.

#ifndef GMETA_OPS_LAYER_ROW_NORM_CUH_
#define GMETA_OPS_LAYER_ROW_NORM_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/layer/activation.cuh"
#include "ops/layer/eight.cuh"

namespace gmeta::hstu {

template <class T>
struct RowNorm {
  int64_t rows;
  int width;
  float epsilon;
  const T *x, *gate;        // gate may be null
  const T *scale, *offset;  // (width); null: 1 and 0
  int64_t x_stride, gate_stride;
};

inline constexpr int kNormThreads = 256;
inline constexpr int kNormBlocks = 1056;        // about as many as are resident at a time
inline constexpr int kNormBlocksSumming = 264;  // those that write a sum each
inline constexpr int kNormWidest = 4096;        // most numbers in a row

// How the threads of a block divide rows among themselves.
template <int kWarps>
struct RowGroup {
  static constexpr int kRows = kNormThreads / 32 / kWarps;  // rows of a block at a time
  static constexpr int kThreads = 32 * kWarps;

  int thread = threadIdx.x % kThreads;
  int64_t first = blockIdx.x * kRows + threadIdx.x / kThreads;
  int64_t step = static_cast<int64_t>(gridDim.x) * kRows;

  __device__ int column(int chunk) const { return 8 * (chunk * kThreads + thread); }

  // Sums one number of each thread of the row, in a fixed order.
  __device__ float Sum(float x) const {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, by);
    if constexpr (kWarps > 1) {
      __shared__ float of_warp[kNormThreads / 32];
      const int warp = threadIdx.x / 32, own = warp / kWarps * kWarps;
      __syncthreads();
      of_warp[warp] = x;
      __syncthreads();
      x = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) x += of_warp[own + i];
    }
    return x;
  }
};

// Loads a thread's numbers of a row; those past its end are 0.
template <int kChunks, int kWarps, class T>
__device__ __forceinline__ void LoadRow(const RowGroup<kWarps>& group, const T* row, int width,
                                        float (&to)[8 * kChunks]) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = group.column(chunk);
    Eight<T> eight{};
    if (column < width) eight = Eight<T>::Load(row + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[8 * chunk + i] = eight.at(i);
  }
}

template <int kChunks, int kWarps, class T>
__device__ __forceinline__ void StoreRow(const RowGroup<kWarps>& group,
                                         const float (&from)[8 * kChunks], int width, T* row) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = group.column(chunk);
    if (column < width) Eight<T>::Store(&from[8 * chunk], row + column);
  }
}

template <class T, int kChunks, int kWarps>
__global__ void __launch_bounds__(kNormThreads)
    NormRows(RowNorm<T> in, T* y, int64_t y_stride, float2* statistics) {
  const RowGroup<kWarps> group;
  const float share = 1.0f / static_cast<float>(in.width);
  // All warps of a block make equally many rounds: they synchronize in Sum.
  for (int64_t begin = blockIdx.x * group.kRows; begin < in.rows; begin += group.step) {
    const int64_t row = begin + threadIdx.x / group.kThreads;
    const bool there = row < in.rows;
    const int width = there ? in.width : 0;
    float x[8 * kChunks], other[8 * kChunks];
    LoadRow<kChunks>(group, in.x + row * in.x_stride, width, x);
    // Load it now, so that it has arrived when the sums are done.
    if (in.gate != nullptr) LoadRow<kChunks>(group, in.gate + row * in.gate_stride, width, other);
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) sum += x[i];
    const float mean = share * group.Sum(sum);
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) {
      x[i] = group.column(i / 8) < width ? x[i] - mean : 0.0f;
      squares += x[i] * x[i];
    }
    const float scale = rsqrtf(share * group.Sum(squares) + in.epsilon);
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) {
      x[i] *= scale;
      if (in.gate != nullptr) other[i] *= Sigmoid(other[i]);
    }
    if (in.scale != nullptr) {
      float weights[8 * kChunks];
      LoadRow<kChunks>(group, in.scale, width, weights);
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) x[i] *= weights[i];
      LoadRow<kChunks>(group, in.offset, width, weights);
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) x[i] += weights[i];
    }
    if (in.gate != nullptr) {
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) x[i] *= other[i];
    }
    StoreRow<kChunks>(group, x, width, y + row * y_stride);
    if (there && group.thread == 0) statistics[row] = make_float2(mean, scale);
  }
}

// The inputs and outputs of gradients. `x_added` and `gate_added`, if not null, are the gradients
// of other uses of x and of SiLU(gate). `sums` is (groups, 2, width) float; null: no weights.
template <class T>
struct RowNormGradients {
  const T *of_y, *x_added, *gate_added;
  T *of_x, *of_gate;
  float* sums;
  int64_t of_y_stride, x_added_stride, gate_added_stride, of_x_stride, of_gate_stride;
};

// Writes the gate's gradient, and multiplies h, y's gradient, by SiLU(gate).
template <int kChunks, int kWarps, class T>
__device__ __forceinline__ void GradientOfGate(const RowGroup<kWarps>& group, const RowNorm<T>& in,
                                               const RowNormGradients<T>& to, int64_t row,
                                               int width, const float (&c)[8 * kChunks],
                                               float (&h)[8 * kChunks]) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int column = group.column(chunk);
    if (column >= width) continue;
    const Eight<T> gate = Eight<T>::Load(in.gate + row * in.gate_stride + column);
    Eight<T> scale{}, offset{}, added{};
    if (in.scale != nullptr) scale = Eight<T>::Load(in.scale + column);
    if (in.scale != nullptr) offset = Eight<T>::Load(in.offset + column);
    if (to.gate_added != nullptr) {
      added = Eight<T>::Load(to.gate_added + row * to.gate_added_stride + column);
    }
    float of_gate[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float n =
          in.scale == nullptr ? c[8 * chunk + i] : c[8 * chunk + i] * scale.at(i) + offset.at(i);
      const float g = Sigmoid(gate.at(i));
      of_gate[i] = (h[8 * chunk + i] * n + added.at(i)) * g * (1.0f + gate.at(i) * (1.0f - g));
      h[8 * chunk + i] *= gate.at(i) * g;
    }
    Eight<T>::Store(of_gate, to.of_gate + row * to.of_gate_stride + column);
  }
}

// kWeights: whether there are scale and offset, whose gradients take registers.
template <class T, int kChunks, int kWarps, bool kWeights>
__global__ void __launch_bounds__(kNormThreads)
    NormRowsBack(RowNorm<T> in, const float2* statistics, RowNormGradients<T> to) {
  const RowGroup<kWarps> group;
  const float share = 1.0f / static_cast<float>(in.width);
  float of_scale[kWeights ? 8 * kChunks : 1] = {}, of_offset[kWeights ? 8 * kChunks : 1] = {};
  for (int64_t begin = blockIdx.x * group.kRows; begin < in.rows; begin += group.step) {
    const int64_t row = begin + threadIdx.x / group.kThreads;
    const bool there = row < in.rows;
    const int width = there ? in.width : 0;
    const float2 known = there ? statistics[row] : make_float2(0.0f, 0.0f);
    float c[8 * kChunks], h[8 * kChunks];
    LoadRow<kChunks>(group, in.x + row * in.x_stride, width, c);
    LoadRow<kChunks>(group, to.of_y + row * to.of_y_stride, width, h);
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) {
      c[i] = group.column(i / 8) < width ? (c[i] - known.x) * known.y : 0.0f;
    }
    if (in.gate != nullptr) GradientOfGate<kChunks>(group, in, to, row, width, c, h);
    if constexpr (kWeights) {
      float weights[8 * kChunks];
      LoadRow<kChunks>(group, in.scale, width, weights);
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) {
        of_scale[i] += h[i] * c[i];
        of_offset[i] += h[i];
        h[i] *= weights[i];
      }
    }
    float sum = 0.0f, with_c = 0.0f;
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) sum += h[i], with_c += h[i] * c[i];
    sum = share * group.Sum(sum);
    with_c = share * group.Sum(with_c);
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) h[i] = (h[i] - sum - c[i] * with_c) * known.y;
    if (to.x_added != nullptr) {
      LoadRow<kChunks>(group, to.x_added + row * to.x_added_stride, width, c);
#pragma unroll
      for (int i = 0; i < 8 * kChunks; ++i) h[i] += c[i];
    }
    StoreRow<kChunks>(group, h, width, to.of_x + row * to.of_x_stride);
  }
  if constexpr (kWeights) {
    // Sums over the block's groups, one group after another.
    __shared__ float sums[2 * kNormWidest];
    for (int turn = 0; turn < group.kRows; ++turn) {
      if (static_cast<int>(threadIdx.x) / group.kThreads == turn) {
#pragma unroll
        for (int i = 0; i < 8 * kChunks; ++i) {
          const int column = group.column(i / 8) + i % 8;
          if (column >= in.width) continue;
          sums[column] = (turn == 0 ? 0.0f : sums[column]) + of_scale[i];
          sums[in.width + column] = (turn == 0 ? 0.0f : sums[in.width + column]) + of_offset[i];
        }
      }
      __syncthreads();
    }
    float* const to_sums = to.sums + 2 * static_cast<int64_t>(blockIdx.x) * in.width;
    for (int i = threadIdx.x; i < 2 * in.width; i += kNormThreads) to_sums[i] = sums[i];
  }
}

// Adds up the blocks' sums of a column, in the blocks' order.
template <class T>
__global__ void SumBlocks(const float* sums, int width, T* of_scale, T* of_offset) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= 2 * width) return;
  float sum = 0.0f;
  for (int i = 0; i < kNormBlocksSumming; ++i)
    sum += sums[2 * static_cast<int64_t>(i) * width + column];
  (column < width ? of_scale : of_offset - width)[column] = static_cast<T>(sum);
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_ROW_NORM_CUH_
