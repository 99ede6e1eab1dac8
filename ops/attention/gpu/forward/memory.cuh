// What the warps of a block share in the forward pass (forward.cuh): arguments, tiles, buffers and
// barriers.

#ifndef GMETA_OPS_ATTENTION_GPU_FORWARD_MEMORY_CUH_
#define GMETA_OPS_ATTENTION_GPU_FORWARD_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ops/attention/gpu/bias/bias.cuh"
#include "ops/attention/gpu/plan/strips.cuh"
#include "ops/attention/gpu/softmax/row_softmax.cuh"
#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"

namespace gmeta::hstu {

inline constexpr int kConsumers = 2;  // warpgroups that compute
inline constexpr int kForwardThreads = 128 * (1 + kConsumers);

// As many columns as memory has room for, beside two stages and what a bias needs.
template <int kWidth, bool kBiased>
inline constexpr int kForwardColumns = kWidth < 256 ? 128
                                       : kBiased    ? 64
                                                    : 80;

// What a launch computes: with a bias of the scores (kBiased), or with weights that are the bias
// alone (not kScored; then it is kBiased); with the softmax of rows (row_softmax.cuh) or SiLU.
template <class T_, int kWidth_, bool kBiased_, bool kScored_ = true,
          Activation kActivation = Activation::kSilu>
struct ForwardPass {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kScored = kScored_;
  static constexpr bool kSoftmax = kActivation == Activation::kSoftmax;
  static_assert(kScored || (kBiased && !kSoftmax));
};

struct ForwardArguments {
  CUtensorMap q, k, v;  // q and k only in scored kernels
  Plan plan;
  const int32_t* visible;
  void* out;
  int64_t out_stride;
  int64_t tokens;
  int heads;
  float alpha;
  float scale;
  GpuBias bias;     // b, only in biased kernels
  float* log_sums;  // (heads, tokens), only with softmax
};

// The tile that a block of threads works on, and its blocks of columns.
template <int kColumns>
struct ForwardTile {
  Strip both;  // the tile's strips, joined: what its rows see together
  int head;    // below 0: no more work

  __device__ __forceinline__ void Find(const ForwardArguments& in, int work) {
    const int strip = in.plan.row_tiles[work / in.heads];
    head = work % in.heads;
    both = in.plan.strips[strip];
    if (both.row + kStripRows < both.length) both.Join(in.plan.strips[strip + 1]);
  }
  __device__ __forceinline__ bool Sees(int block) const {
    const Columns c{block * kColumns, (block + 1) * kColumns};
    return c.begin < both.first_max || (c.begin < both.end_max && c.end > both.begin_min) ||
           (c.begin < both.row + kTileRows && c.end > both.row);
  }
  __device__ __forceinline__ int Last() const {
    const int seen = max(both.first_max, both.end_max);
    return (max(seen, min(both.row + kTileRows, both.length)) - 1) / kColumns;
  }
  // Returns the next block to process after this one; below 0: there is none.
  __device__ __forceinline__ int After(int block) const {
    --block;
    return block < 0 || Sees(block) ? block : BeforeGap(block);
  }
  // Returns the last block before a hidden one that any row may see, without a search: a block is
  // seen in full view, in the window, or as the rows' own.
  __device__ __forceinline__ int BeforeGap(int block) const {
    const auto last = [block](int begin, int end) {
      const int found = min(block, end > 0 ? (end - 1) / kColumns : -1);
      return found * kColumns + kColumns > begin ? found : -1;
    };
    const int own = last(both.row, both.row + kTileRows);
    return max(own, max(last(0, both.first_max), last(both.begin_min, both.end_max)));
  }
};

template <class P>
struct ForwardMemory {
  using T = typename P::T;
  static constexpr int kWidth = P::kWidth;
  static constexpr int kColumns = kForwardColumns<kWidth, P::kBiased>;
  static constexpr int kStages = 2;

  // The consumers are given two tiles, so that the next tile's rows arrive while this tile ends: in
  // the memory of this one's rows, if those are in registers.
  static constexpr int kTiles = kWidth == 256 ? 1 : 2;
  static constexpr bool kOwnInRegisters = kWidth < 256;
  using Bias = BlockBias<kTileRows, P::kBiased ? kColumns : 64>;

  alignas(1024) T q[P::kScored ? kTileRows * kWidth : 8];
  alignas(1024) T k[kStages][P::kScored ? kColumns * kWidth : 8];
  alignas(1024) T v[kStages][kColumns * kWidth];
  std::conditional_t<P::kBiased, Bias, NoBias> bias[kStages];
  std::conditional_t<P::kBiased, BucketValues, NoBias> values;
  ForwardTile<kColumns> tiles[kTiles];
  RowView views[kTiles][kTileRows];
  hopper::Barrier tile_full[kTiles], tile_free[kTiles];
  hopper::Barrier q_full, q_free;
  hopper::Barrier k_full[kStages], k_free[kStages], v_full[kStages], v_free[kStages];
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_FORWARD_MEMORY_CUH_
