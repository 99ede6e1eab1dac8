// The distinct keys of a batch on the GPU, and two operations with them: copying rows to positions,
// and summing positions back to rows. unique.cuh, owner_order.cuh and segments.cuh describe how.
//
// All pointers are to device memory unless a comment says otherwise. All work is queued on
// `stream`; no function waits for it. The caller provides scratch memory: as many bytes as the
// workspace function returns, aligned to 256, with any content. It is free again when the work on
// the stream is done. At most 2^30 ids in a call.

#ifndef GMETA_OPS_UNIQUE_GPU_UNIQUE_ABI_H_
#define GMETA_OPS_UNIQUE_GPU_UNIQUE_ABI_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

// Returns the bytes of scratch for n ids. `ranks` is 0 for gmeta_gpu_unique, else the value given
// to gmeta_gpu_unique_by_owner.
GMETA_CUDA_API size_t gmeta_gpu_unique_workspace(int64_t n, int32_t ranks);

// Finds the distinct ids in the order of their first appearance.
//   ids      (n,) any int64
//   keys     (n,) of which the first `count` are written
//   inverse  (n,) keys[inverse[i]] == ids[i]
//   count    () the number of keys
GMETA_CUDA_API int gmeta_gpu_unique(const int64_t* ids, int64_t n, int64_t* keys, int32_t* inverse,
                                    int32_t* count, void* workspace, size_t workspace_bytes,
                                    void* stream);

// Does the same, but orders keys by the rank that owns them, and those of a rank by their first
// appearance. Rank r of `ranks` (1 to 1024) owns the logical shards s with s * ranks / 1024 == r,
// rounded down.
//   counts   (ranks,) the number of keys that each rank owns; their sum is `count`
GMETA_CUDA_API int gmeta_gpu_unique_by_owner(const int64_t* ids, int64_t n, int32_t ranks,
                                             int64_t* keys, int32_t* inverse, int32_t* counts,
                                             int32_t* count, void* workspace,
                                             size_t workspace_bytes, void* stream);

// Returns the bytes of scratch for gmeta_gpu_order_by_owner of n ids and this many ranks.
GMETA_CUDA_API size_t gmeta_gpu_order_by_owner_workspace(int64_t n, int32_t ranks);

// Orders all ids by the rank that owns them, those of a rank in their former order; none is left
// out.
//   ids      (n,) any int64; they may not overlap with `keys`
//   keys     (n,) the ids in their order
//   inverse  (n,) keys[inverse[i]] == ids[i], each place once
//   counts   (ranks,) the number of ids that each rank owns
GMETA_CUDA_API int gmeta_gpu_order_by_owner(const int64_t* ids, int64_t n, int32_t ranks,
                                            int64_t* keys, int32_t* inverse, int32_t* counts,
                                            void* workspace, size_t workspace_bytes, void* stream);

// Copies rows of `dim` floats: out[i] = rows[inverse[i]], for i < n.
GMETA_CUDA_API int gmeta_gpu_gather_rows(const float* rows, int64_t dim, const int32_t* inverse,
                                         int64_t n, float* out, void* stream);

// Returns the bytes of scratch for gmeta_gpu_segment_sum of n values of `dim` floats into u rows.
GMETA_CUDA_API size_t gmeta_gpu_segment_sum_workspace(int64_t n, int64_t u, int64_t dim);

// The gradient of gmeta_gpu_gather_rows: out[j] = sum of values[i] over all i with inverse[i] == j.
// The order of addition is fixed, so the same input gives the same bits. Rows are added in the
// order of i. A segment longer than 256 is cut into pieces of 256, each added in the order of i,
// and the pieces are then added in their order. A row without values becomes zero.
//   values   (n, dim)
//   inverse  (n,) in [0, u)
//   out      (u, dim)
GMETA_CUDA_API int gmeta_gpu_segment_sum(const float* values, int64_t dim, const int32_t* inverse,
                                         int64_t n, int64_t u, float* out, void* workspace,
                                         size_t workspace_bytes, void* stream);

}  // extern "C"

#endif  // GMETA_OPS_UNIQUE_GPU_UNIQUE_ABI_H_
