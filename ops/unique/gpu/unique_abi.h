// The distinct keys of a batch on the GPU, and what goes with them: rows to positions, and sums of
// positions back to rows. unique.cuh and segment_sum.cuh describe how.
//
// All pointers are to device memory, unless said otherwise. All work is queued on `stream`; nothing
// waits for it. Scratch memory is the caller's: as many bytes as the workspace function says,
// aligned to 256, holding anything; it is free again when the work on the stream is done. At most
// 2^30 ids in a call.

#ifndef GMETA_OPS_UNIQUE_GPU_UNIQUE_ABI_H_
#define GMETA_OPS_UNIQUE_GPU_UNIQUE_ABI_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/cuda_abi.h"

extern "C" {

// Bytes of scratch for n ids. `ranks`: 0 for gmeta_gpu_unique, else as given to
// gmeta_gpu_unique_by_owner.
GMETA_CUDA_API size_t gmeta_gpu_unique_workspace(int64_t n, int32_t ranks);

// The distinct ids in the order of their first appearance.
//   ids      (n,) any int64
//   keys     (n,) of which the first `count` are written
//   inverse  (n,) keys[inverse[i]] == ids[i]
//   count    () how many keys there are
GMETA_CUDA_API int gmeta_gpu_unique(const int64_t* ids, int64_t n, int64_t* keys, int32_t* inverse,
                                    int32_t* count, void* workspace, size_t workspace_bytes,
                                    void* stream);

// The same, but keys stand by the rank that owns them, and those of a rank in the order of their
// first appearance. Rank r of `ranks` (1 to 1024) owns the logical shards s with s * ranks / 1024
// == r, rounded down.
//   counts   (ranks,) how many keys each rank owns; their sum is `count`
GMETA_CUDA_API int gmeta_gpu_unique_by_owner(const int64_t* ids, int64_t n, int32_t ranks,
                                             int64_t* keys, int32_t* inverse, int32_t* counts,
                                             int32_t* count, void* workspace,
                                             size_t workspace_bytes, void* stream);

// out[i] = rows[inverse[i]] of `dim` floats, for i < n.
GMETA_CUDA_API int gmeta_gpu_gather_rows(const float* rows, int64_t dim, const int32_t* inverse,
                                         int64_t n, float* out, void* stream);

// Bytes of scratch for gmeta_gpu_segment_sum of n values of `dim` floats into u rows.
GMETA_CUDA_API size_t gmeta_gpu_segment_sum_workspace(int64_t n, int64_t u, int64_t dim);

// The gradient of gmeta_gpu_gather_rows: out[j] = sum of values[i] over all i with inverse[i] == j.
// The order of addition is fixed, so the same input gives the same bits: rows are added in the
// order of i; of a segment longer than 256, pieces of 256 are added so, and then the pieces in
// their order. A row of no values becomes zero.
//   values   (n, dim)
//   inverse  (n,) in [0, u)
//   out      (u, dim)
GMETA_CUDA_API int gmeta_gpu_segment_sum(const float* values, int64_t dim, const int32_t* inverse,
                                         int64_t n, int64_t u, float* out, void* workspace,
                                         size_t workspace_bytes, void* stream);

}  // extern "C"

#endif  // GMETA_OPS_UNIQUE_GPU_UNIQUE_ABI_H_
