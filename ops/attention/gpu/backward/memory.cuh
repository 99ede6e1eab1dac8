// What the warps of a block share in the backward pass (backward.cuh): buffers, barriers, and the
// producer's messages to the consumers.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_MEMORY_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ops/attention/gpu/bias/bias.cuh"
#include "ops/attention/gpu/bias/diagonal_sums.cuh"
#include "ops/attention/gpu/bias/table_parts.cuh"
#include "ops/attention/gpu/fragments.cuh"
#include "ops/attention/gpu/plan/strips.cuh"
#include "ops/attention/gpu/softmax/softmax_rows.cuh"
#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"
#include "ops/hopper/wgmma.cuh"

namespace gmeta::hstu {

inline constexpr int kGroups = BiasParts::kGroups;  // that compute, each one strip of the tile
inline constexpr int kBackwardThreads = 128 * (1 + kGroups);

// What a launch computes, for a tile of its own tokens against all blocks that they meet:
//   own tokens are columns: the gradient of k from that of the scores, that of v from the weights;
//   own tokens are rows: the gradient of q from that of the scores, and with kOfBias those of the
//   bias's tables (table_sums.cuh), or with kTimesOnly of that of times, if it is the only one;
//   these alone (kAlone), where there is no q.
// If not kScored, the weights are the bias alone: there is no first product, and no Q and K.
// Weights are the softmax of rows, or SiLU.
template <class T_, int kWidth_, bool kBiased_, bool kColumns_, bool kOfScores_, bool kOfWeights_,
          bool kOfBias_ = false, bool kScored_ = true, bool kTimesOnly_ = false,
          Activation kActivation = Activation::kSilu>
struct BackwardPass {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kColumns = kColumns_;
  static constexpr bool kOfScores = kOfScores_;
  static constexpr bool kOfWeights = kOfWeights_;
  static constexpr bool kOfBias = kOfBias_;
  static constexpr bool kScored = kScored_;
  static constexpr bool kAlone = kOfBias && !kScored;
  static constexpr bool kTimesOnly = kTimesOnly_;
  static constexpr bool kSoftmax = kActivation == Activation::kSoftmax;
  static_assert(kScored || !kSoftmax);

  // 64 tokens of a head: boxes of 64 numbers a row, one after another.
  static constexpr int kBoxes = kWidth / hopper::kBoxWidth;
  static constexpr int kBoxBytes = kStripRows * hopper::kBoxWidth * static_cast<int>(sizeof(T));
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  // The weights need the scores only; the scores' gradient needs the second product too.
  static constexpr int kOwnTensors = kOfScores ? 2 : 1;

  // Registers of a consumer for sums, products and its own tokens. Own tokens stay in registers if
  // there is room; then a product reads half as much shared memory.
  static constexpr int kSums = kAlone ? 0 : (kOfScores + kOfWeights) * kWidth / 2;
  static constexpr int kProducts = kOfScores ? 64 : 32;
  static constexpr int kRounded = kAlone ? 8 : (kOfScores + kOfWeights) * 16;
  static constexpr int kOwnNumbers = kOwnTensors * kWidth / 4;
  static constexpr bool kOwnInRegisters = kSums + kProducts + kRounded + kOwnNumbers <= 208;

  // Own tokens of the next tile are copied while this tile's sums run: to the one buffer, whose
  // tokens are in registers, or to a second buffer where it fits.
  static constexpr int kOwnBuffers = !kOwnInRegisters && kWidth <= 128 ? 2 : 1;
  static constexpr bool kOwnAhead = kOwnInRegisters || kOwnBuffers == 2;
  static constexpr int kToldTiles = 4;  // a multiple of twice the buffers, to count rounds

  static constexpr int kOwnBytes = kOwnBuffers * kGroups * kOwnTensors * kTileBytes;
  // At width 256 there is room for the bias of blocks only beside one own tensor.
  static constexpr bool kNearBias = kBiased && (kWidth < 256 || kOwnTensors == 1);
  using Bias = BlockBias<kTileRows, kStripRows>;
  static constexpr bool kDiagonals = kOfBias && !kAlone && !kTimesOnly;
  static constexpr int kOtherBytes = 3072 + (kNearBias ? sizeof(BucketValues) : 0) +
                                     (kDiagonals ? kGroups * sizeof(Diagonals) : 0);
  static constexpr int kSlotBytes =
      kTileBytes + (kNearBias ? static_cast<int>(sizeof(Bias)) / 2 : 0);
  static constexpr int kRoom = (hopper::kMaxSharedBytes - kOtherBytes - kOwnBytes) / kSlotBytes;
  static constexpr int kSlots = kRoom > 8 ? 8 : kRoom > 3 ? kRoom / 2 * 2 : kRoom;
  static constexpr bool kEven = kSlots % 2 == 0;  // then a block's tiles have neighbouring slots
  // Where there are few slots, a block's are freed before the tables' sums begin, so that the next
  // block is copied meanwhile.
  static constexpr bool kFreesFirst = kOfBias && !kAlone && !kNearBias;
  static_assert(kSlots >= (kFreesFirst ? 2 : 3), "a block's two tiles, and one to come");
};

// What the two groups do with a block. kSeen and kMasked have one bit per group.
inline constexpr int kSeen = 1;          // any score counts
inline constexpr int kMasked = 4;        // not all scores count
inline constexpr int kPartial = 1 << 4;  // the sequence ends in the block

// The description of a block, which belongs to the slot of its first tile.
template <class P, bool kSoftmaxRows = P::kColumns && P::kSoftmax>
struct BlockHeader {
  int row;                                      // its first token's place in the sequence
  int flags;                                    // kSeen, kMasked, kPartial
  RowView views[P::kColumns ? kStripRows : 1];  // only for blocks of rows that are masked
};
// What softmax needs of rows takes the place that narrow views leave.
template <class P>
struct BlockHeader<P, true> {
  alignas(16) RowNumbers rows[kStripRows];
  NarrowView views[kStripRows];
  int row;
  int flags;
};

// The description of a group's own tokens. `row` past the sequence's end: no such strip.
struct OwnStrip : OwnPlace {
  int first_strip;  // the sequence's first strip
  int blocks;       // blocks to come; below 0: there are no more tiles
};

// Integers for sums by bucket, in a pass that has little memory left (BucketSums::AddMany).
struct FewBuckets {
  static constexpr int kSize = 48;
  int of_warps[4][kSize];
};

template <class P>
struct alignas(1024) BackwardMemory {
  char own[P::kOwnBuffers][kGroups][P::kOwnTensors][P::kTileBytes];
  char slots[P::kSlots][P::kTileBytes];
  static constexpr int kHeaders = P::kEven ? P::kSlots / 2 : 2;
  BlockHeader<P> headers[kHeaders];
  std::conditional_t<P::kNearBias, typename P::Bias, NoBias> bias[kHeaders];
  OwnStrip strips[P::kToldTiles][kGroups];
  hopper::Barrier own_full[P::kOwnBuffers][kGroups], own_free[P::kOwnBuffers][kGroups];
  hopper::Barrier full[P::kSlots], free[P::kSlots];
  std::conditional_t<P::kBiased, BucketValues, NoBias> values;
  std::conditional_t<P::kDiagonals, Diagonals[kGroups], NoBias> diagonals;
  std::conditional_t<P::kTimesOnly, FewBuckets[kGroups], NoBias> few_buckets;

  // One thread calls it, before all threads synchronize.
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

// The place of a tile in the slots, in one of two rounds of its slot. A block takes two places: its
// own and its Second.
//
// An even number of slots is a ring. Of three, the first tiles of blocks take the slots 0 and 2 in
// turn, the second tiles slot 1. A second tile is used up early, by the block's second product, a
// first tile late, by the sums: so both of the next block are copied while the sums run.
template <class P>
struct RingPlace {
  static constexpr int kPlaces = P::kEven ? 2 * P::kSlots : 8;
  int number = 0;

  __device__ __forceinline__ int slot() const {
    if constexpr (P::kEven) return number >= P::kSlots ? number - P::kSlots : number;
    return number % 2 != 0 ? 1 : number & 2;
  }
  __device__ __forceinline__ int header() const {
    if constexpr (P::kEven) return slot() / 2;
    return number / 2 % 2;
  }
  __device__ __forceinline__ uint32_t round() const {
    if constexpr (P::kEven) return number >= P::kSlots;
    return number % 2 != 0 ? number / 2 % 2 : number / 4;
  }
  __device__ __forceinline__ RingPlace Second() const { return {number + 1}; }
  __device__ __forceinline__ RingPlace AfterNext() const {
    return {number + 2 >= kPlaces ? number + 2 - kPlaces : number + 2};
  }
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
  GpuBias bias;     // only in biased passes
  BiasParts parts;  // only with kOfBias
  // Gradients of the own tokens: from the scores' gradient, and from the weights.
  void* of_scores;
  int64_t of_scores_stride;
  void* of_weights;
  int64_t of_weights_stride;
  RowTables rows;  // only with softmax
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_MEMORY_CUH_
