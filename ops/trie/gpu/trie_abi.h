// The C interface of tries on the GPU: the step of a beam search, and the logs of children's
// probabilities. ops/trie/host has the same for the CPU, and says what they compute.
//
// Pointers are to device memory. Work is queued on `stream`; no function waits for it, allocates,
// or needs scratch. Functions return a status (cuda_abi.h).
//
// What is in device memory can't be told about in words. Nothing is read or written outside of the
// arrays that are named here, and what is wrong shows in the results: see each function.
//
// Exponentials and logarithms are CUDA's, within 2 units in the last place, and a node's siblings
// are added by 32 lanes and then in pairs. So the logs of probabilities are the CPU's to about
// 1e-6 of the greatest difference of logits, and equal on each run. Where scores are equal on both,
// the order is the same.

#ifndef GMETA_OPS_TRIE_GPU_TRIE_ABI_H_
#define GMETA_OPS_TRIE_GPU_TRIE_ABI_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

// A level of a trie (ops/trie/level.h).
struct GmetaTrieLevel {
  const int64_t* starts;   // (nodes + 1,)
  const int32_t* digits;   // (children,)
  const uint8_t* allowed;  // (children,), 0 or 1; null: all are
  int64_t nodes;
  int64_t children;
};

// Takes a step for all users.
//   logits  (users, beams, codes)
//   scores  (users, beams)
//   nodes   (users, beams), below 0: there is no beam
//   next_*  (users, k); -infinity, -1 and -1 where there are fewer
// If a user's input is wrong, a node or a digit that isn't there, a score that is NaN, a logit that
// is NaN or infinity, all k of its next scores are NaN, and nodes and beams -1. Other users' are
// right. Unlike the CPU, it reads the children of all beams. k and beams are at most
// gmeta_gpu_trie_most(); more is GMETA_CUDA_UNSUPPORTED.
GMETA_CUDA_API int gmeta_gpu_trie_step(const float* logits, const float* scores,
                                       const int64_t* nodes, int64_t users, int64_t beams,
                                       int64_t codes, const GmetaTrieLevel* level, int64_t k,
                                       float* next_scores, int64_t* next_nodes, int32_t* next_beams,
                                       void* stream);

// Returns the most beams that a step takes, and keeps.
GMETA_CUDA_API int64_t gmeta_gpu_trie_most(void);

// Computes logs of probabilities.
//   logits    (n, codes)
//   nodes     (n,)
//   children  (n,), each a child of its node, or -1
//   log_probs (n,); 0 where the child is -1; NaN where the input is wrong
GMETA_CUDA_API int gmeta_gpu_trie_log_probs(const float* logits, const int64_t* nodes,
                                            const int64_t* children, int64_t n, int64_t codes,
                                            const GmetaTrieLevel* level, float* log_probs,
                                            void* stream);

// Computes the gradient of logits from that of log_probs.
//   of_log_probs (n,)
//   of_logits    (n, codes); a row of NaN where the input is wrong
GMETA_CUDA_API int gmeta_gpu_trie_log_probs_gradient(const float* of_log_probs, const float* logits,
                                                     const int64_t* nodes, const int64_t* children,
                                                     int64_t n, int64_t codes,
                                                     const GmetaTrieLevel* level, float* of_logits,
                                                     void* stream);

}  // extern "C"

#endif  // GMETA_OPS_TRIE_GPU_TRIE_ABI_H_
