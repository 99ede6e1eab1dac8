// The C interface of HSTU's attention on the GPU. TensorFlow's kernels call it, and so do tests,
// with ctypes.
//
//   o_i = s sum_{j in V(i)} SiLU(alpha q_i k_j + b_ij) v_j
//
// or by the bias alone, o_i = s sum_{j in V(i)} b_ij v_j, if q and k have no data (null), or with
// the softmax of a row's scores in place of their SiLU:
//
//   o_i = s sum_{j in V(i)} P_ij v_j     P_ij = exp(x_ij) / sum_{j in V(i)} exp(x_ij)
//                                        x_ij = alpha q_i k_j + b_ij
//
// Functions return a status (cuda_abi.h). Pointers are to device memory unless a comment says
// otherwise. Functions queue work on `stream`, a cudaStream_t, and don't wait for it.

#ifndef GMETA_OPS_ATTENTION_GPU_ATTENTION_ABI_H_
#define GMETA_OPS_ATTENTION_GPU_ATTENTION_ABI_H_

#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

enum { GMETA_BFLOAT16 = 0, GMETA_FLOAT16 = 1 };

// A (tokens, heads, width) tensor. Its tokens are `stride` numbers apart, and its heads lie one
// after another, so a part of a wider projection needn't be copied. `stride` is a multiple of 8
// numbers; `data` is 16-byte aligned.
struct GmetaHeads {
  void* data;
  int64_t stride;
};

// The bias b: a table over distances in places and one over buckets of times. Either may be absent
// (null).
struct GmetaHstuBias {
  const float* positions;  // (2 n - 1), for column - row from -(n - 1) on, clamped at both ends
  int64_t n;
  const float* time_buckets;  // by the bucket of |row_times[row] - column_times[column]|
  int32_t buckets;
  const void* time_map;  // written by gmeta_hstu_time_map
};

// Makes the weights a softmax. alpha is at least 0, and there are q and k.
struct GmetaSoftmax {
  // (heads, tokens): log2 sum_j exp(x_ij). The forward pass writes it, the gradients read it.
  float* log_sums;
  // Only for gradients: the forward pass's output, and a workspace, (heads, tokens).
  GmetaHeads out;
  float* products;
};

struct GmetaHstuAttention {
  int32_t dtype;   // of q, k, v and all tensors of their shape
  int32_t batch;   // number of sequences
  int64_t tokens;  // number of tokens in all sequences, below 2^31
  int32_t heads;
  int32_t width;  // of one head of q, k and v: 64, 128 or 256
  float alpha;
  float scale;             // s
  const int32_t* visible;  // (tokens, 3): AttentionMask.visible
  const void* plan;        // written by gmeta_hstu_plan for the same offsets and mask
  GmetaHeads q, k, v;
  const GmetaHstuBias* bias;    // in host memory; null: no bias
  const GmetaSoftmax* softmax;  // in host memory; null: SiLU
};

// The gradients of a bias's tables, and a workspace of gmeta_hstu_bias_workspace bytes for partial
// sums.
struct GmetaHstuBiasGradient {
  float* positions;
  float* time_buckets;
  void* workspace;  // 16-byte aligned
};

// Returns GMETA_CUDA_UNSUPPORTED if the current device has no kernels for this dtype and width.
GMETA_CUDA_API int gmeta_hstu_supported(int32_t dtype, int32_t width);

// Returns the size of a plan in bytes. A plan says which parts of the scores to compute. It depends
// on offsets and mask alone, so one plan serves all layers and heads, and the gradients too.
GMETA_CUDA_API int64_t gmeta_hstu_plan_bytes(int64_t tokens, int32_t batch);
// Writes the plan. `offsets` is (batch + 1) int64; `plan` is 16-byte aligned.
GMETA_CUDA_API int gmeta_hstu_plan(const int64_t* offsets, const int32_t* visible, int64_t tokens,
                                   int32_t batch, void* plan, void* stream);

// Returns in `bytes`, in host memory, the size of a plan's map of times, 16-byte aligned. Waits for
// the plan.
GMETA_CUDA_API int gmeta_hstu_time_map_bytes(const void* plan, int64_t tokens, int32_t batch,
                                             int64_t* bytes, void* stream);
// Writes the map of times: the buckets of |row_times[row] - column_times[column]|, both (tokens).
// `starts` holds the smallest difference of each bucket from the second on: in host memory, not
// decreasing, at most 255 of them. One map serves all attentions with its plan.
GMETA_CUDA_API int gmeta_hstu_time_map(const void* plan, int64_t tokens, int32_t batch,
                                       const int64_t* row_times, const int64_t* column_times,
                                       const int64_t* starts, int32_t size, void* map,
                                       void* stream);

// Writes `out`, which has v's shape.
GMETA_CUDA_API int gmeta_hstu_forward(const GmetaHstuAttention* attention, GmetaHeads out,
                                      void* stream);

// Writes the gradients of q, k and v, given that of out. If there is a bias and `of_bias` isn't
// null, it writes the bias's gradients too. Results are the same to the last bit in each run on the
// same kind of GPU.
GMETA_CUDA_API int gmeta_hstu_backward(const GmetaHstuAttention* attention, GmetaHeads of_out,
                                       GmetaHeads of_q, GmetaHeads of_k, GmetaHeads of_v,
                                       const GmetaHstuBiasGradient* of_bias, void* stream);
// Returns the bytes of workspace that the bias's gradients need on the current device.
GMETA_CUDA_API int64_t gmeta_hstu_bias_workspace(const GmetaHstuAttention* attention);

}  // extern "C"

#endif  // GMETA_OPS_ATTENTION_GPU_ATTENTION_ABI_H_
