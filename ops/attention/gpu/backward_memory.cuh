// What the warps of a block of the backward pass (backward.cuh) share: buffers, barriers, and
// what the producer tells the consumers.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_MEMORY_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/gpu/bias.cuh"
#include "ops/attention/gpu/strips.cuh"
#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"
#include "ops/hopper/wgmma.cuh"

namespace gmeta::hstu {

inline constexpr int kGroups = 2;  // warpgroups that compute, a strip of the tile each
inline constexpr int kBackwardThreads = 128 * (1 + kGroups);

// What a launch computes, for a tile of its own tokens against blocks of all that they meet:
//   own tokens are columns: with the gradient of scores that of k, with the weights that of v;
//   own tokens are rows: with the gradient of scores that of q, or, kOfBias, those of the bias's
//   tables (bias_gradient.cuh).
template <class T_, int kWidth_, bool kBiased_, bool kColumns_, bool kOfScores_, bool kOfWeights_,
          bool kOfBias_ = false>
struct BackwardPass {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kColumns = kColumns_;
  static constexpr bool kOfScores = kOfScores_;
  static constexpr bool kOfWeights = kOfWeights_;
  static constexpr bool kOfBias = kOfBias_;

  // 64 tokens of a head: boxes of 64 numbers a row, one after another.
  static constexpr int kBoxes = kWidth / hopper::kBoxWidth;
  static constexpr int kBoxBytes = kStripRows * hopper::kBoxWidth * static_cast<int>(sizeof(T));
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  // Weights alone are of the scores; their gradient is of the second product too.
  static constexpr int kOwnTensors = kOfScores ? 2 : 1;

  // Registers of a consumer's sums and products, and of its own tokens, which stay there if there
  // is room: then a product reads half as much of shared memory.
  static constexpr int kSums = kOfBias ? 0 : (kOfScores + kOfWeights) * kWidth / 2;
  static constexpr int kProducts = kOfScores ? 64 : 32;
  static constexpr int kRounded = kOfBias ? 8 : (kOfScores + kOfWeights) * 16;
  static constexpr int kOwnNumbers = kOwnTensors * kWidth / 4;
  static constexpr bool kOwnInRegisters = kSums + kProducts + kRounded + kOwnNumbers <= 208;

  // Own tokens of the next tile are copied while the sums of this one are under way: to registers'
  // place, or to a second buffer where it fits.
  static constexpr int kOwnBuffers = !kOwnInRegisters && kWidth <= 128 ? 2 : 1;
  static constexpr bool kOwnAhead = kOwnInRegisters || kOwnBuffers == 2;
  static constexpr int kToldTiles = 4;  // a multiple of twice the buffers, to count rounds by

  static constexpr int kOwnBytes = kOwnBuffers * kGroups * kOwnTensors * kTileBytes;
  static constexpr bool kTimeEntries = kBiased && kWidth < 256;
  static constexpr int kOtherBytes = 3072 + (kTimeEntries ? sizeof(TimeEntries<true>) : 0);
  static constexpr int kRoom = (hopper::kMaxSharedBytes - kOtherBytes - kOwnBytes) / kTileBytes;
  static constexpr int kSlots = kRoom > 8 ? 8 : kRoom > 3 ? kRoom / 2 * 2 : kRoom;
  static constexpr bool kEven = kSlots % 2 == 0;  // blocks then begin at even slots
  static_assert(kSlots >= 3, "a block's two tiles, and one to come");
};

// What the two groups do with a block: a bit a group.
inline constexpr int kSeen = 1;          // any score counts
inline constexpr int kMasked = 4;        // not all scores count
inline constexpr int kPartial = 1 << 4;  // the sequence ends in the block

// A block, as its first tile's slot tells of it.
template <class P>
struct BlockHeader {
  int row;                                      // its first token, in the sequence
  int flags;                                    // kSeen, kMasked, kPartial
  RowView views[P::kColumns ? kStripRows : 1];  // where the blocks are rows, and masked
};

// What a group is told of its own tokens.
struct OwnStrip {
  int token;   // the sequence's first
  int length;  // of the sequence
  int row;     // the strip's first token, in the sequence; behind its end: there is no such strip
  int head;
  int blocks;  // that are to come; below 0: there is no tile any more
};

template <class P>
struct alignas(1024) BackwardMemory {
  char own[P::kOwnBuffers][kGroups][P::kOwnTensors][P::kTileBytes];
  char slots[P::kSlots][P::kTileBytes];
  BlockHeader<P> headers[P::kEven ? P::kSlots / 2 : P::kSlots];
  OwnStrip strips[P::kToldTiles][kGroups];
  hopper::Barrier own_full[P::kOwnBuffers][kGroups], own_free[P::kOwnBuffers][kGroups];
  hopper::Barrier full[P::kSlots], free[P::kSlots];
  TimeEntries<P::kTimeEntries> entries;

  // By one thread, before all wait for it.
  __device__ __forceinline__ void Init() {
    for (int i = 0; i < P::kOwnBuffers * kGroups; ++i) {
      own_full[i / kGroups][i % kGroups].Init(1);
      own_free[i / kGroups][i % kGroups].Init(4 * hopper::kWarpArrivals);
    }
    for (int i = 0; i < P::kSlots; ++i) {
      full[i].Init(hopper::kWarpArrivals), free[i].Init(4 * kGroups * hopper::kWarpArrivals);
    }
    hopper::FenceBarrierInit();
  }
};

// A place in the ring of slots, in one of two rounds. A block has it and the next one.
template <class P>
struct RingPlace {
  int number = 0;

  __device__ __forceinline__ int slot() const {
    return number >= P::kSlots ? number - P::kSlots : number;
  }
  __device__ __forceinline__ int header() const { return P::kEven ? slot() / 2 : slot(); }
  __device__ __forceinline__ uint32_t round() const { return number >= P::kSlots; }
  __device__ __forceinline__ RingPlace After(int places) const {
    const int next = number + places;
    return {next >= 2 * P::kSlots ? next - 2 * P::kSlots : next};
  }
  __device__ __forceinline__ RingPlace Second() const {
    return P::kEven ? RingPlace{number + 1} : After(1);
  }
  __device__ __forceinline__ RingPlace AfterNext() const { return After(2); }
};

struct BackwardArguments {
  CUtensorMap own[2];     // K and V, or Q and dO
  CUtensorMap others[2];  // Q and dO, or K and V
  Plan plan;
  const int32_t* visible;
  int64_t tokens;
  int heads;
  float alpha;
  float scale;
  GpuBias bias;  // of passes that are biased
  // Gradients of the own tokens, by scores and by weights.
  void* of_scores;
  int64_t of_scores_stride;
  void* of_weights;
  int64_t of_weights_stride;
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_MEMORY_CUH_
