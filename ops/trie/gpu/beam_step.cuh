// The step of a beam search on the GPU (ops/trie/host/beam_step.h says what it computes): a block a
// user, a warp a beam. Ranks (ranks.cuh) defines what the best are kept by.
//
//   1. Warps read the siblings of each beam: the greatest logit, and the sum of exponentials.
//   2. The block selects the k best children (selection.cuh). Each pass reads their ranks again, as
//      they, or logits, and digits are in the cache by then; storing 50 beams of 256 children would
//      take more shared memory than there is for 200. A beam whose best child can't be among the k
//      is skipped.
//   3. Each of the k finds its place by counting those before it.
//
// Nothing depends on the order of threads: the k best are the same however they are found.

#ifndef GMETA_OPS_TRIE_GPU_BEAM_STEP_CUH_
#define GMETA_OPS_TRIE_GPU_BEAM_STEP_CUH_

#include "ops/common/gpu/shared_memory.cuh"
#include "ops/common/splitmix.h"
#include "ops/trie/gpu/beams.cuh"
#include "ops/trie/gpu/ranks.cuh"
#include "ops/trie/gpu/selection.cuh"
#include "ops/trie/gpu/siblings.cuh"
#include "ops/trie/level.h"

namespace gmeta::trie {

inline constexpr int kStepThreads = 1024;
inline constexpr int64_t kMostBeams =
    1536;  // also to be kept: these fit in 99 KiB, which all GPUs have

// One of the k best.
struct Kept {
  int64_t node;
  uint32_t rank;
  int32_t beam;

  __device__ bool IsBefore(const Kept& other) const {
    if (rank != other.rank) return rank > other.rank;
    const uint64_t ours = Hash(), theirs = other.Hash();
    return ours != theirs ? ours < theirs : beam < other.beam;
  }
  __device__ uint64_t Hash() const { return SplitMix64(static_cast<uint64_t>(node)); }
};

// Of a block.
struct StepShared {
  Selection selection;
  uint32_t children;  // of all beams
  uint32_t kept;
  int32_t wrong;
  // It is followed by ReadBeam[beams] and Kept[k].
};

inline int StepSharedBytes(int64_t beams, int64_t k) {
  return static_cast<int>(sizeof(StepShared) + beams * sizeof(ReadBeam) + k * sizeof(Kept));
}

template <class Ranks>
class StepBlock {
 public:
  __device__ StepBlock(const BeamsOnGpu& from, const GmetaTrieLevel& level, const Ranks& ranks,
                       int32_t k)
      : from_(from),
        level_(level),
        ranks_(ranks),
        k_(k),
        first_(static_cast<int64_t>(blockIdx.x) * from.beams),
        shared_(*reinterpret_cast<StepShared*>(DynamicShared())),
        beams_(reinterpret_cast<ReadBeam*>(&shared_ + 1)),
        best_(reinterpret_cast<Kept*>(beams_ + from.beams)) {}

  __device__ __forceinline__ void Run(const NextOnGpu& to) {
    if (threadIdx.x == 0) {
      shared_.children = shared_.kept = 0;
      shared_.wrong = 0;
      shared_.selection.Start(static_cast<uint32_t>(k_));
    }
    __syncthreads();
    ReadBeams();
    __syncthreads();
    const bool wrong = shared_.wrong != 0;
    if (!wrong) {
      if (shared_.children > static_cast<uint32_t>(k_)) {
        shared_.selection.Run([&](const auto& visit) {
          EachNumber([&](const Number& number, int64_t, int32_t) { visit(number); });
        });
      }
      Keep();
      __syncthreads();
    }
    const int64_t first = static_cast<int64_t>(blockIdx.x) * k_;
    const int32_t kept = wrong ? 0 : static_cast<int32_t>(shared_.kept);
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < k_; i += kStepThreads) {
      if (i >= kept) {
        const float none = wrong ? NAN : -INFINITY;
        to.Set(first + i, none, -1, -1, none);
        continue;
      }
      int32_t place = 0;
      for (int32_t j = 0; j < kept; ++j) place += best_[j].IsBefore(best_[i]) ? 1 : 0;
      const float rank = FromOrderedBits(best_[i].rank);
      to.Set(first + place, ScoreOf(best_[i], rank), best_[i].node, best_[i].beam, rank);
    }
  }

 private:
  __device__ __forceinline__ void ReadBeams() {
    for (int32_t i = static_cast<int32_t>(threadIdx.x / 32); i < from_.beams;
         i += kStepThreads / 32) {
      const int64_t place = first_ + i;
      const WarpSiblings s = from_.SiblingsOf(level_, place);
      if (threadIdx.x % 32 != 0) continue;
      beams_[i] = {s.first, s.count, from_.scores[place], s.most, LogOfSum(s.sum)};
      if (s.count > 0) atomicAdd(&shared_.children, static_cast<uint32_t>(s.allowed));
      if (s.wrong || (from_.nodes[place] >= 0 && ranks_.IsWrong(place))) shared_.wrong = 1;
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
      if (beam.count == 0) continue;
      const uint32_t most = OrderedBits(ranks_.MostOfChildren(beam, first_ + i));
      if ((most & threshold.known[0]) < threshold.words[0]) continue;
      EachChild(level_, beam.first, beam.count, ranks_.RowOf(from_, first_ + i),
                [&](int64_t child, int32_t, float of_digit) {
                  const Number number{{OrderedBits(ranks_.OfChild(beam, of_digit)),
                                       ~SplitMix64(static_cast<uint64_t>(child)),
                                       ~static_cast<uint32_t>(i)}};
                  visit(number, child, i);
                });
    }
  }

  __device__ __forceinline__ void Keep() {
    EachNumber([&](const Number& number, int64_t child, int32_t beam) {
      if (!shared_.selection.Has(number)) return;
      best_[atomicAdd(&shared_.kept, 1u)] = {child, static_cast<uint32_t>(number.words[0]), beam};
    });
  }

  __device__ float ScoreOf(const Kept& child, float rank) const {
    if constexpr (Ranks::kAreScores) return rank;
    return beams_[child.beam].ScoreOf(
        from_.LogitsOf(first_ + child.beam)[DigitOf(level_, child.node)]);
  }

  const BeamsOnGpu& from_;
  const GmetaTrieLevel& level_;
  const Ranks& ranks_;
  const int32_t k_;
  const int64_t first_;  // the place of the user's first beam
  StepShared& shared_;
  ReadBeam* const beams_;
  Kept* const best_;
};

template <class Ranks>
__global__ void __launch_bounds__(kStepThreads)
    Step(BeamsOnGpu from, GmetaTrieLevel level, Ranks ranks, int32_t k, NextOnGpu to) {
  StepBlock<Ranks>(from, level, ranks, k).Run(to);
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_GPU_BEAM_STEP_CUH_
