// HSTU's attention on the GPU, as C: what TensorFlow's kernels call, and tests with ctypes.
//
//   o_i = s sum_{j in V(i)} SiLU(alpha q_i k_j + b_ij) v_j
//
// Functions return a status (cuda_abi.h). Pointers are to device memory, unless it says otherwise;
// work is queued on `stream`, a cudaStream_t, and nothing waits for it.

#ifndef GMETA_OPS_ATTENTION_GPU_ATTENTION_ABI_H_
#define GMETA_OPS_ATTENTION_GPU_ATTENTION_ABI_H_

#include <cstdint>

#include "ops/common/cuda_abi.h"

extern "C" {

enum { GMETA_BFLOAT16 = 0, GMETA_FLOAT16 = 1 };

// A (tokens, heads, width) tensor whose tokens are `stride` numbers apart and whose heads lie one
// after another: a part of a wider projection needn't be copied. A multiple of 8 numbers, and
// 16-byte aligned.
struct GmetaHeads {
  void* data;
  int64_t stride;
};

// b: a table of places and one of buckets of times, each perhaps absent (null).
struct GmetaHstuBias {
  const float* positions;  // (2 n - 1), of column - row from -(n - 1) on; longer ways take the ends
  int64_t n;
  const float* time_buckets;  // of |row_times[row] - column_times[column]|
  int32_t buckets;
  const void* table;         // of gmeta_hstu_time_table
  const int64_t* row_times;  // (tokens)
  const int64_t* column_times;
};

struct GmetaHstuAttention {
  int32_t dtype;   // of q, k, v and all that is shaped like them
  int32_t batch;   // sequences
  int64_t tokens;  // of all sequences, below 2^31
  int32_t heads;
  int32_t width;  // of a head, of q, k and v alike: 64, 128 or 256
  float alpha;
  float scale;             // s
  const int32_t* visible;  // (tokens, 3): AttentionMask.visible
  const void* plan;        // of gmeta_hstu_plan, for the same offsets and mask
  GmetaHeads q, k, v;
  const GmetaHstuBias* bias;  // in host memory; null: there is none
};

// The gradients of a bias's tables, and memory for their parts of gmeta_hstu_bias_workspace bytes.
struct GmetaHstuBiasGradient {
  float* positions;
  float* time_buckets;
  void* workspace;  // 16-byte aligned
};

// GMETA_CUDA_UNSUPPORTED where the current device has no kernels for a dtype and a width.
GMETA_CUDA_API int gmeta_hstu_supported(int32_t dtype, int32_t width);

// Bytes of a plan, which says what parts of the scores are to be computed. It is of offsets and
// mask alone: one serves all layers and heads, and the gradients too.
GMETA_CUDA_API int64_t gmeta_hstu_plan_bytes(int64_t tokens, int32_t batch);
// `offsets` is (batch + 1) int64; `plan` 16-byte aligned.
GMETA_CUDA_API int gmeta_hstu_plan(const int64_t* offsets, const int32_t* visible, int64_t tokens,
                                   int32_t batch, void* plan, void* stream);

// What finds the bucket of a time: of the smallest difference of each bucket from the second on, in
// host memory, not decreasing, at most 255. `table` is 8-byte aligned.
GMETA_CUDA_API int64_t gmeta_hstu_time_table_bytes(void);
GMETA_CUDA_API int gmeta_hstu_time_table(const int64_t* starts, int32_t size, void* table,
                                         void* stream);

// Writes `out`, which is shaped as v.
GMETA_CUDA_API int gmeta_hstu_forward(const GmetaHstuAttention* attention, GmetaHeads out,
                                      void* stream);

// Writes the gradients of q, k and v from that of out, and of the bias where there is one and
// `of_bias` isn't null. Results are the same to the last bit in each run on the same kind of GPU.
GMETA_CUDA_API int gmeta_hstu_backward(const GmetaHstuAttention* attention, GmetaHeads of_out,
                                       GmetaHeads of_q, GmetaHeads of_k, GmetaHeads of_v,
                                       const GmetaHstuBiasGradient* of_bias, void* stream);
// On the current device.
GMETA_CUDA_API int64_t gmeta_hstu_bias_workspace(const GmetaHstuAttention* attention);

}  // extern "C"

#endif  // GMETA_OPS_ATTENTION_GPU_ATTENTION_ABI_H_
