// The C ABI of tries on the GPU: checks and launches.

#include <cstdint>
#include <string>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/trie/gpu/beam_step.cuh"
#include "ops/trie/gpu/beams.cuh"
#include "ops/trie/gpu/log_probs.cuh"
#include "ops/trie/gpu/ranks.cuh"
#include "ops/trie/gpu/sample.cuh"
#include "ops/trie/gpu/trie_abi.h"

namespace gmeta::trie {
namespace {

void CheckSizes(const char* op, int64_t rows, int64_t codes, const GmetaTrieLevel* level) {
  Require(rows >= 0 && rows <= (int64_t{1} << 31) && codes >= 0 && level->nodes >= 0 &&
              level->children >= 0,
          std::string(op) + ": sizes must be positive and rows at most 2^31, got " +
              std::to_string(rows) + " rows of " + std::to_string(codes) + " codes");
}

BeamsOnGpu CheckedBeams(const char* op, const float* logits, const float* scores,
                        const int64_t* nodes, int64_t users, int64_t beams, int64_t codes,
                        const GmetaTrieLevel* level) {
  Require(beams >= 0 && beams <= INT32_MAX,
          std::string(op) + ": the number of beams must be that of an int32, and not negative");
  CheckSizes(op, users, codes, level);
  CheckSizes(op, users * beams, codes, level);
  return {logits, scores, nodes, users, static_cast<int32_t>(beams), codes};
}

void CheckStep(const char* op, int64_t beams, int64_t k) {
  Require(k >= 1, std::string(op) + ": k must be positive");
  if (k <= kMostBeams && beams <= kMostBeams) return;
  throw CudaError(GMETA_CUDA_UNSUPPORTED, std::string(op) + ": a GPU takes and keeps at most " +
                                              std::to_string(kMostBeams) + " beams, got " +
                                              std::to_string(beams) + " and k " +
                                              std::to_string(k) +
                                              ": take fewer, or the CPU (with "
                                              "tf.device('CPU:0'))");
}

template <class Ranks>
void LaunchStep(const char* op, const BeamsOnGpu& from, const GmetaTrieLevel& level,
                const Ranks& ranks, int64_t k, const NextOnGpu& to, cudaStream_t stream) {
  Launch(Step<Ranks>, static_cast<unsigned>(from.users), kStepThreads,
         StepSharedBytes(from.beams, k), stream, op, from, level, ranks, static_cast<int32_t>(k),
         to);
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
    constexpr char kOp[] = "trie_step";
    CheckStep(kOp, beams, k);
    const BeamsOnGpu from = CheckedBeams(kOp, logits, scores, nodes, users, beams, codes, level);
    if (users == 0) return;
    LaunchStep(kOp, from, *level, ByScoreOnGpu{}, k, {next_scores, next_nodes, next_beams, nullptr},
               static_cast<cudaStream_t>(stream));
  });
}

int gmeta_gpu_trie_gumbel_step(const float* logits, const float* scores, const float* ranks,
                               const int64_t* nodes, int64_t users, int64_t beams, int64_t codes,
                               const GmetaTrieLevel* level, const GmetaTrieNoise* noise, int64_t k,
                               float* scratch, float* next_scores, int64_t* next_nodes,
                               int32_t* next_beams, float* next_ranks, void* stream) {
  return Guarded([&] {
    constexpr char kOp[] = "trie_gumbel_step";
    CheckStep(kOp, beams, k);
    const BeamsOnGpu from = CheckedBeams(kOp, logits, scores, nodes, users, beams, codes, level);
    if (users == 0) return;
    const auto on = static_cast<cudaStream_t>(stream);
    if (beams > 0) {
      gmeta::Launch(WriteGumbelRanks, BlocksOfRows(users * beams), kRowThreads, 0, on, kOp, from,
                    *level, *noise, ranks, scratch);
    }
    LaunchStep(kOp, from, *level, ByGumbelOnGpu{ranks, scratch}, k,
               {next_scores, next_nodes, next_beams, next_ranks}, on);
  });
}

int gmeta_gpu_trie_sample(const float* logits, const float* scores, const int64_t* nodes,
                          int64_t users, int64_t beams, int64_t codes, const GmetaTrieLevel* level,
                          const GmetaTrieNoise* noise, float* next_scores, int64_t* next_nodes,
                          int32_t* next_beams, void* stream) {
  return Guarded([&] {
    constexpr char kOp[] = "trie_sample";
    const BeamsOnGpu from = CheckedBeams(kOp, logits, scores, nodes, users, beams, codes, level);
    if (users == 0 || beams == 0) return;
    gmeta::Launch(Sample, BlocksOfRows(users * beams), kRowThreads, 0,
                  static_cast<cudaStream_t>(stream), kOp, from, *level, *noise,
                  NextOnGpu{next_scores, next_nodes, next_beams, nullptr});
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
