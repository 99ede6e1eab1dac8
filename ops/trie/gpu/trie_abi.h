// The C interface of tries on the GPU: the step of a beam search, draws, and the logs of children's
// probabilities. ops/trie/host has the same for the CPU, and describes what they compute.
//
// Pointers are to device memory. Work is queued on `stream`; no function waits for it or allocates.
// Functions return a status (cuda_abi.h).
//
// Faults in device memory can't be reported by messages. Nothing is read or written outside of the
// arrays that are named here, and faults show in the results: see each function.
//
// For the same input, results are those of the CPU, and the same on each run. Exponentials have the
// CPU's bits, and a node's siblings are added in its order, so
//   - children that are drawn by gmeta_gpu_trie_sample are the CPU's, always;
//   - scores, logs of probabilities and ranks with noise are its floats, except for fewer than one
//     in 10^8, because the libraries' logarithms and exponentials in double precision differ in the
//     last bits (ops/trie/weights.h, ops/trie/gumbel_rank.h). Those are the next floats.
// A step then keeps the same children in the same order, unless such a float is that close to
// another child's. Gradients agree to about 1e-6 of the upstream gradient.

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
  const int64_t* wide_digits;  // (children,) in place of digits, which are null then; or null
};

// What random numbers are functions of (ops/trie/noise.h).
struct GmetaTrieNoise {
  const int64_t* seed;  // (1,)
  const int64_t* step;  // (1,)
  const int64_t* keys;  // (users,)
  int64_t level;        // 0 to 2^15 - 1
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

// Takes a step by scores with noise, which draws without replacement. Beside what
// gmeta_gpu_trie_step has:
//   ranks      (users, beams)
//   noise      of the users
//   scratch    (users, beams, codes), which is overwritten
//   next_ranks (users, k), -infinity where there are fewer
// Children of one node must have distinct digits. A rank that is NaN is wrong input, and then next
// ranks are NaN too.
GMETA_CUDA_API int gmeta_gpu_trie_gumbel_step(
    const float* logits, const float* scores, const float* ranks, const int64_t* nodes,
    int64_t users, int64_t beams, int64_t codes, const GmetaTrieLevel* level,
    const GmetaTrieNoise* noise, int64_t k, float* scratch, float* next_scores, int64_t* next_nodes,
    int32_t* next_beams, float* next_ranks, void* stream);

// Returns the most beams that either step takes, and keeps.
GMETA_CUDA_API int64_t gmeta_gpu_trie_most(void);

// Draws a child of each beam.
//   logits, scores, nodes: as of gmeta_gpu_trie_step, of any number of beams
//   noise   of the users
//   next_*  (users, beams); -infinity, -1 and -1 where there is no beam, or no child has a chance
// If the input of a beam is wrong, its next score is NaN, and node and beam are -1. Other beams'
// are right.
GMETA_CUDA_API int gmeta_gpu_trie_sample(const float* logits, const float* scores,
                                         const int64_t* nodes, int64_t users, int64_t beams,
                                         int64_t codes, const GmetaTrieLevel* level,
                                         const GmetaTrieNoise* noise, float* next_scores,
                                         int64_t* next_nodes, int32_t* next_beams, void* stream);

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
