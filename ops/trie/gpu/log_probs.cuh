// Logs of children's probabilities and their gradient (ops/trie/host/log_probs.h): a warp a row.

#ifndef GMETA_OPS_TRIE_GPU_LOG_PROBS_CUH_
#define GMETA_OPS_TRIE_GPU_LOG_PROBS_CUH_

#include "ops/trie/gpu/beams.cuh"
#include "ops/trie/gpu/siblings.cuh"

namespace gmeta::trie {

struct RowsOnGpu {
  const float* logits;
  const int64_t *nodes, *children;
  int64_t n, codes;
};

// Whether `child` may follow the node that siblings were read of.
__device__ __forceinline__ bool IsWrongChild(const GmetaTrieLevel& level, int64_t node,
                                             int64_t child) {
  if (child < level.starts[node] || child >= level.starts[node + 1]) return true;
  return level.allowed != nullptr && level.allowed[child] == 0;
}

__global__ void LogProbs(RowsOnGpu rows, GmetaTrieLevel level, float* log_probs) {
  const int64_t row = RowOfWarp();
  if (row >= rows.n) return;
  const int64_t node = rows.nodes[row], child = rows.children[row];
  float y = 0.0f;
  if (child != -1) {
    const float* const logits = rows.logits + row * rows.codes;
    const WarpSiblings s = ReadSiblings(level, node, logits, rows.codes);
    if (s.wrong || IsWrongChild(level, node, child)) {
      y = NAN;
    } else {
      y = s.count == 0 ? -INFINITY : s.LogProb(logits[DigitOf(level, child)], LogOfSum(s.sum));
    }
  }
  if (threadIdx.x % 32 == 0) log_probs[row] = y;
}

__global__ void LogProbsGradient(const float* of_log_probs, RowsOnGpu rows, GmetaTrieLevel level,
                                 float* of_logits) {
  const int64_t row = RowOfWarp();
  if (row >= rows.n) return;
  const int64_t node = rows.nodes[row], child = rows.children[row];
  const float* const logits = rows.logits + row * rows.codes;
  float* const to = of_logits + row * rows.codes;
  WarpSiblings s{0, 0, 0, 0.0f, 0.0f, false};
  if (child != -1) s = ReadSiblings(level, node, logits, rows.codes);
  const bool wrong = s.wrong || (child != -1 && IsWrongChild(level, node, child));
  const float rest = wrong ? NAN : 0.0f;
  for (int64_t i = threadIdx.x % 32; i < rows.codes; i += 32) to[i] = rest;
  if (wrong || s.count == 0) return;
  __syncwarp();  // other lanes wrote what this one writes over
  const float upstream = of_log_probs[row];
  const float each = upstream / s.sum;
  EachChild(level, s.first, s.count, logits, [&](int64_t here, int32_t digit, float logit) {
    to[digit] = (here == child ? upstream : 0.0f) - each * s.Weight(logit);
  });
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_LOG_PROBS_CUH_
