// The beams of users in a GPU's memory, those that come next, and the noise of users.

#ifndef GMETA_OPS_TRIE_GPU_BEAMS_CUH_
#define GMETA_OPS_TRIE_GPU_BEAMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/trie/gpu/siblings.cuh"
#include "ops/trie/gpu/trie_abi.h"
#include "ops/trie/noise.h"

namespace gmeta::trie {

// A beam is identified by its place among those of all users.
struct BeamsOnGpu {
  const float *logits, *scores;
  const int64_t* nodes;
  int64_t users;
  int32_t beams;
  int64_t codes;

  __device__ const float* LogitsOf(int64_t place) const { return logits + place * codes; }
  // By a whole warp. Without a beam there are no siblings.
  __device__ __forceinline__ WarpSiblings SiblingsOf(const GmetaTrieLevel& level,
                                                     int64_t place) const {
    if (nodes[place] < 0) return {0, 0, 0, 0.0f, 1.0f, false};
    WarpSiblings s = ReadSiblings(level, nodes[place], LogitsOf(place), codes);
    s.wrong = s.wrong || scores[place] != scores[place];
    return s;
  }
};

struct NextOnGpu {
  float* scores;
  int64_t* nodes;
  int32_t* beams;
  float* ranks;  // or null

  __device__ void Set(int64_t place, float score, int64_t node, int32_t beam, float rank) const {
    scores[place] = score;
    nodes[place] = node;
    beams[place] = beam;
    if (ranks != nullptr) ranks[place] = rank;
  }
};

__device__ inline Noise NoiseOf(const GmetaTrieNoise& noise, int64_t user) {
  return {static_cast<uint64_t>(*noise.seed), static_cast<uint64_t>(*noise.step),
          static_cast<uint32_t>(noise.level), static_cast<uint64_t>(noise.keys[user])};
}

// Where each warp has a row, or a beam: its number is that of the warp in the grid.
inline constexpr int kRowThreads = 256;

inline unsigned BlocksOfRows(int64_t rows) {
  constexpr int64_t kRows = kRowThreads / 32;
  return static_cast<unsigned>((rows + kRows - 1) / kRows);
}

__device__ __forceinline__ int64_t RowOfWarp() {
  return (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / 32;
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_BEAMS_CUH_
