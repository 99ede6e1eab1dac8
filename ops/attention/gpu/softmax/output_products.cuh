// What the gradients of a softmax need of each row's output: D_i = sum_d dO_id O_id / s.
//
//   P_ij = exp(x_ij) / sum_j exp(x_ij)     dx_ij = P_ij (dP_ij - sum_j P_ij dP_ij)
//
// With dP_ij = s dO_i v_j and O_i = s sum_j P_ij v_j, the inner sum is dO_i O_i: it needs no pass
// over columns (T. Dao et al., "FlashAttention", 2022, section B.2). The passes multiply by s at
// their end, so D is without it. Both tensors are read once, as fast as memory delivers them.

#ifndef GMETA_OPS_ATTENTION_GPU_SOFTMAX_OUTPUT_PRODUCTS_CUH_
#define GMETA_OPS_ATTENTION_GPU_SOFTMAX_OUTPUT_PRODUCTS_CUH_

#include "ops/attention/gpu/attention_abi.h"
#include "ops/common/gpu/cuda_launch.cuh"

namespace gmeta::hstu {

struct OutputProductsArguments {
  GmetaHeads of_out, out;
  int64_t tokens;
  int heads;
  float factor;     // 1 / s
  float* products;  // (heads, tokens)
};

inline constexpr int kProductsThreads = 256;

// As many neighbouring threads as a head has units of 16 bytes multiply those of a row.
template <class T, int kWidth>
__global__ void __launch_bounds__(kProductsThreads)
    OutputProductsKernel(const __grid_constant__ OutputProductsArguments in) {
  constexpr int kUnit = 8, kThreads = kWidth / kUnit;
  static_assert(kThreads <= 32);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t rows = in.tokens * in.heads, row = thread / kThreads;
  const int64_t token = row / in.heads, head = row % in.heads, at = thread % kThreads;
  float sum = 0.0f;
  if (row < rows) {
    const auto unit_of = [&](const GmetaHeads& x) {
      const T* const of_row = static_cast<const T*>(x.data) + token * x.stride + head * kWidth;
      return reinterpret_cast<const uint4*>(of_row)[at];
    };
    const uint4 units[2] = {unit_of(in.of_out), unit_of(in.out)};
    const auto* const of_out = reinterpret_cast<const T*>(&units[0]);
    const auto* const out = reinterpret_cast<const T*>(&units[1]);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      sum = fmaf(static_cast<float>(of_out[i]), static_cast<float>(out[i]), sum);
    }
  }
#pragma unroll
  for (int by = kThreads / 2; by > 0; by /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, by);
  if (row < rows && at == 0) in.products[head * in.tokens + token] = in.factor * sum;
}

template <class T, int kWidth>
void OutputProducts(const GmetaHstuAttention& a, const GmetaHeads& of_out, cudaStream_t stream) {
  // Without outputs there are no gradients either: any D is right.
  const float factor = a.scale == 0.0f ? 0.0f : 1.0f / a.scale;
  const OutputProductsArguments in{of_out,  a.softmax->out, a.tokens,
                                   a.heads, factor,         a.softmax->products};
  const int64_t threads = a.tokens * a.heads * (kWidth / 8);
  const auto blocks = static_cast<unsigned>((threads + kProductsThreads - 1) / kProductsThreads);
  gmeta::Launch(OutputProductsKernel<T, kWidth>, blocks, kProductsThreads, 0, stream,
                "hstu attention, products of outputs and gradients", in);
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_SOFTMAX_OUTPUT_PRODUCTS_CUH_
