// The step of a beam search on the GPU (ops/trie/host/beam_step.h says what it computes): a block a
// user, a warp a beam.
//
//   1. Warps read the siblings of each beam: the greatest logit, and the sum of exponentials.
//   2. The block selects the k best children (selection.cuh). Their scores are computed again in
//      each pass, as logits and digits are in the cache by then; storing 50 beams of 256 children
//      would take more shared memory than there is for 200. A beam whose best child can't be among
//      the k is passed over.
//   3. Each of the k finds its place by counting those before it.
//
// Nothing depends on the order of threads: the k best are the same however they are found.

#ifndef GMETA_OPS_TRIE_GPU_BEAM_STEP_CUH_
#define GMETA_OPS_TRIE_GPU_BEAM_STEP_CUH_

#include "ops/common/gpu/shared_memory.cuh"
#include "ops/trie/gpu/selection.cuh"
#include "ops/trie/gpu/siblings.cuh"
#include "ops/trie/level.h"

namespace gmeta::trie {

inline constexpr int kStepThreads = 1024;
inline constexpr int64_t kMostBeams =
    1536;  // also to be kept: these fit in 99 KiB, which all GPUs have

struct BeamsOnGpu {
  const float *logits, *scores;
  const int64_t* nodes;
  int32_t beams;
  int64_t codes;
  int32_t k;
};

// A beam whose siblings have been read.
struct ReadBeam {
  int64_t first;
  int32_t count;
  float score, most, log_sum;
};

// One of the k best.
struct Kept {
  uint64_t hash;
  int64_t node;
  uint32_t rank;
  int32_t beam;

  __device__ bool IsBefore(const Kept& other) const {
    if (rank != other.rank) return rank > other.rank;
    return hash != other.hash ? hash < other.hash : beam < other.beam;
  }
};

// Of a block.
struct StepShared {
  Selection selection;
  uint32_t children;  // of all beams
  uint32_t kept;
  int32_t wrong;
  // After it ReadBeam[beams] and Kept[k].
};

inline int StepSharedBytes(int64_t beams, int64_t k) {
  return static_cast<int>(sizeof(StepShared) + beams * sizeof(ReadBeam) + k * sizeof(Kept));
}

class StepBlock {
 public:
  __device__ StepBlock(const BeamsOnGpu& from, const GmetaTrieLevel& level)
      : from_(from),
        level_(level),
        user_(blockIdx.x),
        shared_(*reinterpret_cast<StepShared*>(DynamicShared())),
        beams_(reinterpret_cast<ReadBeam*>(&shared_ + 1)),
        best_(reinterpret_cast<Kept*>(beams_ + from.beams)) {}

  __device__ __forceinline__ void Run(float* scores, int64_t* nodes, int32_t* beams) {
    if (threadIdx.x == 0) {
      shared_.children = shared_.kept = 0;
      shared_.wrong = 0;
      shared_.selection.Start(static_cast<uint32_t>(from_.k));
    }
    __syncthreads();
    ReadBeams();
    __syncthreads();
    scores += user_ * from_.k, nodes += user_ * from_.k, beams += user_ * from_.k;
    const bool wrong = shared_.wrong != 0;
    if (!wrong) {
      if (shared_.children > static_cast<uint32_t>(from_.k)) {
        shared_.selection.Run([&](const auto& visit) {
          EachNumber([&](const Number& number, int64_t, int32_t) { visit(number); });
        });
      }
      Keep();
      __syncthreads();
    }
    const int32_t kept = wrong ? 0 : static_cast<int32_t>(shared_.kept);
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < from_.k; i += kStepThreads) {
      if (i >= kept) {
        scores[i] = wrong ? NAN : -INFINITY;
        nodes[i] = beams[i] = -1;
        continue;
      }
      int32_t place = 0;
      for (int32_t j = 0; j < kept; ++j) place += best_[j].IsBefore(best_[i]) ? 1 : 0;
      scores[place] = FromOrderedBits(best_[i].rank);
      nodes[place] = best_[i].node;
      beams[place] = best_[i].beam;
    }
  }

 private:
  __device__ const float* LogitsOf(int32_t beam) const {
    return from_.logits + (user_ * from_.beams + beam) * from_.codes;
  }

  __device__ __forceinline__ void ReadBeams() {
    for (int32_t i = static_cast<int32_t>(threadIdx.x / 32); i < from_.beams;
         i += kStepThreads / 32) {
      const int64_t node = from_.nodes[user_ * from_.beams + i];
      const float score = from_.scores[user_ * from_.beams + i];
      WarpSiblings s{0, 0, 0, 0.0f, 1.0f, false};
      if (node >= 0) s = ReadSiblings(level_, node, LogitsOf(i), from_.codes);
      if (threadIdx.x % 32 != 0) continue;
      beams_[i] = {s.first, s.count, score, s.most, logf(s.sum)};
      if (s.count > 0) atomicAdd(&shared_.children, static_cast<uint32_t>(s.allowed));
      if (s.wrong || (node >= 0 && score != score)) shared_.wrong = 1;
    }
  }

  // Calls visit(number, child, beam) for the thread's children, of beams that may have one of the k
  // best.
  template <class Visit>
  __device__ __forceinline__ void EachNumber(const Visit& visit) {
    const Selection::Threshold& threshold = shared_.selection.threshold;
    for (int32_t i = static_cast<int32_t>(threadIdx.x / 32); i < from_.beams;
         i += kStepThreads / 32) {
      const ReadBeam beam = beams_[i];
      const auto rank_of = [&](float logit) {
        return OrderedBits(beam.score + ((logit - beam.most) - beam.log_sum) + 0.0f);
      };
      if (beam.count == 0 || (rank_of(beam.most) & threshold.known[0]) < threshold.words[0])
        continue;
      EachChild(level_, beam.first, beam.count, LogitsOf(i),
                [&](int64_t child, int32_t, float logit) {
                  const Number number{{rank_of(logit), ~SplitMix64(static_cast<uint64_t>(child)),
                                       ~static_cast<uint32_t>(i)}};
                  visit(number, child, i);
                });
    }
  }

  __device__ __forceinline__ void Keep() {
    EachNumber([&](const Number& number, int64_t child, int32_t beam) {
      if (!shared_.selection.Has(number)) return;
      best_[atomicAdd(&shared_.kept, 1u)] = {~number.words[1], child,
                                             static_cast<uint32_t>(number.words[0]), beam};
    });
  }

  const BeamsOnGpu& from_;
  const GmetaTrieLevel& level_;
  const int64_t user_;
  StepShared& shared_;
  ReadBeam* const beams_;
  Kept* const best_;
};

__global__ void __launch_bounds__(kStepThreads)
    Step(BeamsOnGpu from, GmetaTrieLevel level, float* scores, int64_t* nodes, int32_t* beams) {
  StepBlock(from, level).Run(scores, nodes, beams);
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_BEAM_STEP_CUH_
