// The C ABI of tries on the GPU: checks and launches.

#include <cstdint>
#include <string>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/trie/gpu/beam_step.cuh"
#include "ops/trie/gpu/log_probs.cuh"
#include "ops/trie/gpu/trie_abi.h"

namespace gmeta::trie {
namespace {

void CheckSizes(const char* op, int64_t rows, int64_t codes, const GmetaTrieLevel* level) {
  Require(rows >= 0 && rows <= (int64_t{1} << 31) && codes >= 0 && level->nodes >= 0 &&
              level->children >= 0,
          std::string(op) + ": sizes must be positive and rows at most 2^31, got " +
              std::to_string(rows) + " rows of " + std::to_string(codes) + " codes");
}

unsigned BlocksOfRows(int64_t rows) {
  constexpr int64_t kRows = kRowThreads / 32;
  return static_cast<unsigned>((rows + kRows - 1) / kRows);
}

}  // namespace
}  // namespace gmeta::trie

using gmeta::Guarded;
using namespace gmeta::trie;

int64_t gmeta_gpu_trie_most(void) { return kMostBeams; }

int gmeta_gpu_trie_step(const float* logits, const float* scores, const int64_t* nodes,
                        int64_t users, int64_t beams, int64_t codes, const GmetaTrieLevel* level,
                        int64_t k, float* next_scores, int64_t* next_nodes, int32_t* next_beams,
                        void* stream) {
  return Guarded([&] {
    CheckSizes("trie_step", users, codes, level);
    gmeta::Require(k >= 1 && beams >= 0, "trie_step: k must be positive, and beams not negative");
    if (k > kMostBeams || beams > kMostBeams) {
      throw gmeta::CudaError(GMETA_CUDA_UNSUPPORTED,
                             "trie_step: a GPU takes and keeps at most " +
                                 std::to_string(kMostBeams) + " beams, got " +
                                 std::to_string(beams) + " and k " + std::to_string(k) +
                                 ": take fewer, or the CPU (with tf.device('CPU:0'))");
    }
    if (users == 0) return;
    const BeamsOnGpu from{
        logits, scores, nodes, static_cast<int32_t>(beams), codes, static_cast<int32_t>(k)};
    gmeta::Launch(Step, static_cast<unsigned>(users), kStepThreads, StepSharedBytes(beams, k),
                  static_cast<cudaStream_t>(stream), "trie_step", from, *level, next_scores,
                  next_nodes, next_beams);
  });
}

int gmeta_gpu_trie_log_probs(const float* logits, const int64_t* nodes, const int64_t* children,
                             int64_t n, int64_t codes, const GmetaTrieLevel* level,
                             float* log_probs, void* stream) {
  return Guarded([&] {
    CheckSizes("trie_log_probs", n, codes, level);
    if (n == 0) return;
    gmeta::Launch(LogProbs, BlocksOfRows(n), kRowThreads, 0, static_cast<cudaStream_t>(stream),
                  "trie_log_probs", RowsOnGpu{logits, nodes, children, n, codes}, *level,
                  log_probs);
  });
}

int gmeta_gpu_trie_log_probs_gradient(const float* of_log_probs, const float* logits,
                                      const int64_t* nodes, const int64_t* children, int64_t n,
                                      int64_t codes, const GmetaTrieLevel* level, float* of_logits,
                                      void* stream) {
  return Guarded([&] {
    CheckSizes("trie_log_probs", n, codes, level);
    if (n == 0) return;
    gmeta::Launch(LogProbsGradient, BlocksOfRows(n), kRowThreads, 0,
                  static_cast<cudaStream_t>(stream), "trie_log_probs", of_log_probs,
                  RowsOnGpu{logits, nodes, children, n, codes}, *level, of_logits);
  });
}
