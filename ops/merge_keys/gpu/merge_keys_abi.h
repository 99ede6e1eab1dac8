// Keys of a merged table from the ids of its features, on the GPU: the same keys and the same first
// offender as on the CPU (ops/merge_keys/merge_keys.h).
//
// A kernel merges the ids of up to 64 features, with as many blocks for each. An id that doesn't
// fit is noted by its place, of which the smallest stays, so that the caller reads one number to
// know that all ids fit.

#ifndef GMETA_OPS_MERGE_KEYS_GPU_MERGE_KEYS_ABI_H_
#define GMETA_OPS_MERGE_KEYS_GPU_MERGE_KEYS_ABI_H_

#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

// The ids of a feature.
typedef struct {
  const void* ids;  // (n,) in device memory, int64_t if `wide` isn't 0, else int32_t
  int64_t n;
  int64_t prefix;  // or-ed into its ids
  int32_t wide;
  int32_t hashed;  // other than 0: any numbers, which are folded into ids
} gmeta_gpu_feature_ids;

// Queues the merge of `count` features on `stream`, and doesn't wait for it.
//   features  (count,) in host memory
//   id_bits   the bits of an id that isn't hashed, 0 to 63
//   mix       other than 0: MixFold into mix_bits, 1 to 63; else XorFold into id_bits, at least 1
//   keys      (sum of n,) in device memory, one feature after another
//   bad       () in device memory: the place among all ids of the first that doesn't fit; -1: all
//   fit
GMETA_CUDA_API int gmeta_gpu_merge_keys(const gmeta_gpu_feature_ids* features, int64_t count,
                                        int32_t id_bits, int32_t mix, int32_t mix_bits,
                                        int64_t* keys, int64_t* bad, void* stream);

}  // extern "C"

#endif  // GMETA_OPS_MERGE_KEYS_GPU_MERGE_KEYS_ABI_H_
