// The bias that the GPU adds to scores for the distance of two tokens, in places and in time
// (relative_bias.h; all heads share the tables).
//
// Scores start from the bias (begin_scores.cuh): a product of the matrix units adds to the numbers
// already in its registers, and alpha (q k + b / alpha) = alpha q k + b. So the bias can be loaded
// there during other products. The matrix units leave little room for that: for each score, a
// thread reads a number of the table of places and one of the table of times from shared memory,
// and adds them. A warp that computes nothing prepares the rest (BiasLoader): for each block of
// tokens, the part of the table of places that its distances need, divided by alpha, and the
// block's part of the map of times (time_map.cuh). Absent tables are zeros.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_BIAS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_BIAS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/gpu/plan/strips.cuh"
#include "ops/attention/gpu/plan/time_map.cuh"
#include "ops/attention/time_buckets.h"
#include "ops/hopper/hopper.cuh"

namespace gmeta::hstu {

// A bias; pointers to absent parts are null.
struct GpuBias {
  const float* positions;  // (2n - 1)
  int n;
  const float* time_buckets;
  int buckets;
  const MapTile* map;
  float factor;  // 1 / alpha

  // Returns the starting value of a distance in places, column - row.
  __device__ __forceinline__ float AtDistance(int distance) const {
    if (positions == nullptr) return 0.0f;
    return factor * __ldg(positions + min(max(distance + n - 1, 0), 2 * n - 2));
  }
  __device__ __forceinline__ float AtBucket(int bucket) const {
    return time_buckets == nullptr || bucket >= buckets ? 0.0f
                                                        : factor * __ldg(time_buckets + bucket);
  }
};

// Starting values by bucket, for a block of threads.
struct BucketValues {
  float of[kMostBuckets];

  // All threads call it, and synchronize before any of them uses a bias.
  __device__ __forceinline__ void Make(const GpuBias& bias) {
    for (int i = static_cast<int>(threadIdx.x); i < kMostBuckets; i += blockDim.x) {
      of[i] = bias.AtBucket(i);
    }
  }
};

// The part of the bias that a block of kOthers tokens needs, for a tile of kOwn own tokens.
template <int kOwn_, int kOthers_>
struct BlockBias {
  static constexpr int kOwn = kOwn_, kOthers = kOthers_;
  static constexpr int kOwnParts = kOwn / kStripRows, kOtherParts = kOthers / kStripRows;
  static constexpr int kRuns = kOwn / kSquare * kOtherParts;
  static constexpr int kPlaces = kOwn + kOthers;

  alignas(128) uint4 map[kOwnParts][kOtherParts][kTileUnits];  // of divided runs only
  float places[kPlaces];  // starting values by the place of other - own + kOwn - 1
  Run runs[kOwn / kSquare][kOtherParts];
};

struct NoBias {};

// Loads the bias of blocks. A warp has one, and calls all functions with all lanes.
template <bool kOwnRows, class Block>
class BiasLoader {
 public:
  // Takes a tile: the sequence's first strip and length, and the place of its first own token.
  __device__ __forceinline__ void SetOwn(const GpuBias& bias, const Plan& plan, int first_strip,
                                         int length, int own) {
    own_ = own;
    if constexpr (kOwnRows) {
      const int row = own / kStripRows + Square() / kSquares;
      row_tiles_ = {0, 0};
      if (bias.map != nullptr && row * kStripRows < length) {
        row_tiles_ = TilesOf(plan, first_strip + row);
      }
    }
  }

  // The tiles of a strip of rows in the map.
  struct RowTiles {
    int first, count;
  };
  static __device__ __forceinline__ RowTiles TilesOf(const Plan& plan, int strip) {
    const int first = static_cast<int>(plan.first_tile[strip]);
    return {first, static_cast<int>(plan.first_tile[strip + 1]) - first};
  }

  // Fetches what the block of other tokens from `other` on needs, whose rows have `of_rows` if own
  // tokens are columns.
  __device__ __forceinline__ void Fetch(const GpuBias& bias, int other, RowTiles of_rows = {}) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    run_ = 0, tile_ = nullptr;
    const RowTiles tiles = kOwnRows ? row_tiles_ : of_rows;
    const int column =
        kOwnRows ? other / kStripRows + Part() : own_ / kStripRows + Square() / kSquares;
    // What no row sees has no tile and doesn't count.
    if (bias.map != nullptr && lane < Block::kRuns && column < tiles.count) {
      tile_ = bias.map + tiles.first + column;
      run_ = (kOwnRows ? tile_->runs.rows : tile_->runs.columns)[Square() % kSquares];
    }
#pragma unroll
    for (int i = 0; i < kPlacesOfLane; ++i) {
      const int apart = lane + 32 * i - (Block::kOwn - 1) + other - own_;
      places_[i] = bias.AtDistance(kOwnRows ? apart : -apart);
    }
  }

  // Writes it to `to`, requests copies of the map's parts whose runs are divided, and arrives at
  // `full`, announcing the copies and `bytes` others.
  __device__ __forceinline__ void Send(Block* to, hopper::Barrier* full, uint32_t bytes) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kPlacesOfLane; ++i) to->places[lane + 32 * i] = places_[i];
    if (lane < Block::kRuns) (&to->runs[0][0])[lane] = static_cast<Run>(run_);
    const unsigned divided = __ballot_sync(kAll, IsDivided(run_));
    // The first lane of those that have runs of a tile copies it.
    const int part = Part(), of_tiles = Square() / kSquares;
    const unsigned of_tile = kLanesOfTile << (of_tiles * kSquares * Block::kOtherParts + part);
    const bool copies = lane < Block::kRuns && Square() % kSquares == 0 && (divided & of_tile) != 0;
    const int copied = __popc(__ballot_sync(kAll, copies));
    full->ArriveAsWarpExpecting(bytes + copied * static_cast<uint32_t>(sizeof(MapTile::units)));
    if (copies) {
      hopper::CopyBytes(to->map[of_tiles][part], tile_->units, sizeof(MapTile::units), full);
    }
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFu;
  static constexpr int kPlacesOfLane = Block::kPlaces / 32;
  // The lanes with runs of a tile, from the first of them on.
  static constexpr unsigned kLanesOfTile = Block::kOtherParts == 1 ? 0xF : 0x55;
  static_assert(Block::kOtherParts <= 2 && Block::kRuns <= 32 && kSquares == 4);

  // The lane's run: 16 own tokens, and 64 others.
  static __device__ __forceinline__ int Square() {
    return static_cast<int>(threadIdx.x % 32) / Block::kOtherParts;
  }
  static __device__ __forceinline__ int Part() {
    return static_cast<int>(threadIdx.x % 32) % Block::kOtherParts;
  }

  int own_ = 0;
  float places_[kPlacesOfLane];
  RowTiles row_tiles_{0, 0};
  uint32_t run_ = 0;
  const MapTile* tile_ = nullptr;
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_BIAS_CUH_
