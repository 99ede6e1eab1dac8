// The numbers that scores start from: the bias (bias.cuh), for a thread's part of a product.
//
// A thread holds numbers of two own tokens, 8 apart, and of pairs of other tokens (wgmma.cuh).
//
// Places. Moving 8 further in both directions leaves the distance the same, so two rows of numbers
// read little more of the table than one row does. All addresses differ by constants, and a warp's
// are within 15 neighbours: no bank has a conflict.
//
// Times. A run of 64 other tokens whose pairs with the warp's 16 own tokens have one bucket takes
// one number. Otherwise each number's bucket is a byte of the map. The branch is the whole warp's.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_BEGIN_SCORES_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_BEGIN_SCORES_CUH_

#include "ops/attention/gpu/bias/bias.cuh"

namespace gmeta::hstu {

// The bias of a block in shared memory, and the values of buckets.
template <bool kOwnRows_, class Block>
struct NearBias {
  static constexpr bool kOwnRows = kOwnRows_;
  static constexpr int kParts = Block::kOtherParts;

  const Block& block;
  const BucketValues& values;
  const float* places;  // of number 0

  __device__ __forceinline__ NearBias(const Block& block, const BucketValues& values, int own)
      : block(block), values(values) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    places = block.places + (Block::kOwn - 1 - kSquare * own - lane / 4 + 2 * (lane % 4));
  }
  __device__ __forceinline__ uint32_t Run(int own, int part) const { return block.runs[own][part]; }
  __device__ __forceinline__ const uint4* Units(int own, int part) const {
    return block.map[own / kSquares][part];
  }
  __device__ __forceinline__ float AtBucket(int bucket) const { return values.of[bucket]; }
  __device__ __forceinline__ static constexpr bool HasPlaces() { return true; }
  __device__ __forceinline__ static constexpr bool Within() { return true; }
  // Returns the value of a place `apart` further than number 0's; AtPlace only if Within.
  __device__ __forceinline__ float AtPlace(int apart) const { return places[apart]; }
  __device__ __forceinline__ float AtAnyPlace(int apart) const { return places[apart]; }
};

// The same from device memory but for the values, for kernels whose tiles leave no room. `own_row`
// and `other_row` are the places in the sequence of the warpgroup's first own token and of the
// block's first.
template <bool kOwnRows_>
struct FarBias {
  static constexpr bool kOwnRows = kOwnRows_;
  static constexpr int kParts = 1;

  const GpuBias& bias;
  const BucketValues& values;
  const MapTile* tile = nullptr;
  int distance;  // of number 0

  __device__ __forceinline__ FarBias(const GpuBias& bias, const BucketValues& values,
                                     const Plan& plan, int first_strip, int own_row, int other_row,
                                     int own)
      : bias(bias), values(values) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int apart = other_row - own_row + 2 * (lane % 4) - own % kSquares * kSquare - lane / 4;
    distance = kOwnRows ? apart : -apart;
    if (bias.map == nullptr) return;
    const int row = (kOwnRows ? own_row : other_row) / kStripRows,
              column = (kOwnRows ? other_row : own_row) / kStripRows;
    const int64_t first = plan.first_tile[first_strip + row];
    if (column < plan.first_tile[first_strip + row + 1] - first) tile = bias.map + first + column;
  }
  __device__ __forceinline__ uint32_t Run(int own, int) const {
    if (tile == nullptr) return 0;
    return __ldg((kOwnRows ? tile->runs.rows : tile->runs.columns) + own % kSquares);
  }
  __device__ __forceinline__ const uint4* Units(int, int) const { return tile->units; }
  __device__ __forceinline__ float AtBucket(int bucket) const { return values.of[bucket]; }
  __device__ __forceinline__ bool HasPlaces() const { return bias.positions != nullptr; }
  // Returns whether all the warp's distances are in the table, so that their addresses differ by
  // constants.
  __device__ __forceinline__ bool Within() const {
    constexpr int kMost = kStripRows + 8;  // a bound of how far numbers are apart
    const int place = distance + bias.n - 1;
    return __all_sync(0xFFFFFFFFu, place >= kMost && place + kMost <= 2 * bias.n - 2);
  }
  __device__ __forceinline__ float AtPlace(int apart) const {
    const float* const first = bias.positions + (distance + bias.n - 1);
    return bias.factor * __ldg(first + (kOwnRows ? apart : -apart));
  }
  __device__ __forceinline__ float AtAnyPlace(int apart) const {
    return bias.AtDistance(distance + (kOwnRows ? apart : -apart));
  }
};

// Calls with(number, its bucket) for a thread's numbers of a divided run: `own` is the number of
// the warp's 16 own tokens, `part` that of the 64 others.
template <class Bias, class With>
__device__ __forceinline__ void ForBuckets(const Bias& bias, int own, int part, const With& with) {
  constexpr bool kOwnRows = Bias::kOwnRows;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint4* const units = bias.Units(own, part);
  uint32_t selects[2];  // the byte, with zeros above it
#pragma unroll
  for (int e = 0; e < 2; ++e) selects[e] = 0x4440 | MapByte<kOwnRows>(e, lane);
#pragma unroll
  for (int square = 0; square < kSquares; ++square) {
    const uint4 unit = units[MapUnit<kOwnRows>(own % kSquares, square, lane)];
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int number = 0; number < 8; ++number) {
      const int j = number / 4, i = number / 2 % 2, e = number % 2;
      with(8 * square + number, __byte_perm(words[MapWord<kOwnRows>(i, j)], 0, selects[e]));
    }
  }
}

// Sets scores = b / alpha, with at_place(number) for the part of places.
template <int kNumbers, class Bias, class AtPlace>
__device__ __forceinline__ void BeginScores(const Bias& bias, int own, float (&scores)[kNumbers],
                                            const AtPlace& at_place) {
  constexpr int kOfPart = 32;  // numbers of 64 other tokens
  static_assert(kNumbers == kOfPart * Bias::kParts);
#pragma unroll
  for (int part = 0; part < Bias::kParts; ++part) {
    const uint32_t run = bias.Run(own, part);
    if (!IsDivided(run)) {
      const float value = bias.AtBucket(LeastOf(run));
#pragma unroll
      for (int number = kOfPart * part; number < kOfPart * (part + 1); ++number) {
        scores[number] = value + at_place(number);
      }
    } else {
      ForBuckets(bias, own, part, [&](int number, uint32_t bucket) {
        scores[kOfPart * part + number] =
            bias.AtBucket(static_cast<int>(bucket)) + at_place(kOfPart * part + number);
      });
    }
  }
}

// Sets scores = b / alpha for a thread's numbers of a product. Number 4 j + 2 i + e belongs to the
// own token 16 `own` + lane / 4 + 8 i of the tile and the other token 2 (lane % 4) + 8 j + e of the
// block. All lanes of a warp call it.
template <int kNumbers, class Bias>
__device__ __forceinline__ void BeginScores(const Bias& bias, int own, float (&scores)[kNumbers]) {
  const auto apart = [](int number) {
    return 8 * (number / 4) - 8 * (number / 2 % 2) + number % 2;
  };
  if (!bias.HasPlaces()) {
    BeginScores(bias, own, scores, [](int) { return 0.0f; });
  } else if (bias.Within()) {
    BeginScores(bias, own, scores, [&](int number) { return bias.AtPlace(apart(number)); });
  } else {
    BeginScores(bias, own, scores, [&](int number) { return bias.AtAnyPlace(apart(number)); });
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_BEGIN_SCORES_CUH_
