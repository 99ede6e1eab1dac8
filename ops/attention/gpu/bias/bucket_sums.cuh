// The sums of a warp of dS by bucket of time, for the gradient of a bias (table_sums.cuh).
//
// The lanes divide the sums. A warp's numbers of a block mostly fall into one bucket
// (TileRuns): then each thread adds its numbers to one sum, until another bucket comes. If there
// are a few buckets, numbers are compared with each of them. If there are more, near the diagonal,
// each number is added to its bucket's in shared memory.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_BUCKET_SUMS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_BUCKET_SUMS_CUH_

#include "ops/attention/gpu/bias/begin_scores.cuh"

namespace gmeta::hstu {

inline constexpr int kStripNumbers = 32;  // of the 64 by 64 numbers, those that a thread holds
inline constexpr int kBucketsOfLane = kMostBuckets / 32;

// Returns the sum over a warp, in all lanes.
__device__ __forceinline__ float SumOfWarp(float x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, by);
  return x;
}

class BucketSums {
  static constexpr int kFew = 6;  // buckets, each of which is looked for among all numbers

 public:
  // `sums` are the warp's, bucket lane + 32 i in number i, from 0 on. They stand apart so that the
  // compiler keeps all of this in registers.
  __device__ __forceinline__ explicit BucketSums(float (&sums)[kBucketsOfLane])
      : of_buckets_(sums) {}

  // Adds the warp's numbers of a block, whose bias this is. `square` is the number of the warp's 16
  // rows in the tile; `room` is the warp's own shared memory for kRoom integers, left as zeros.
  template <int kRoom, class Bias>
  __device__ __forceinline__ void Add(const Bias& bias, int square,
                                      const float (&of_scores)[kStripNumbers], int* room) {
    const uint32_t run = bias.Run(square, 0);
    const int least = LeastOf(run), greatest = GreatestOf(run);
    if (least == greatest) {
      TurnTo(least);
      sum_ += SumOf(of_scores);
    } else if (greatest - least < kFew) {
      AddFew(bias, square, least, greatest, of_scores);
    } else {
      AddMany<kRoom>(bias, square, least, greatest, of_scores, room);
    }
  }

  // Writes the sums of the first `buckets`.
  __device__ __forceinline__ void Write(int buckets, float* to) {
    TurnTo(-1);
#pragma unroll
    for (int i = 0; i < kBucketsOfLane; ++i) {
      const int bucket = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (bucket < buckets) to[bucket] = of_buckets_[i];
    }
  }

 private:
  // Adds `sum`, the same in all lanes, to a bucket's.
  __device__ __forceinline__ void AddToBucket(int bucket, float sum) {
    const bool mine = static_cast<int>(threadIdx.x) % 32 == bucket % 32;
#pragma unroll
    for (int i = 0; i < kBucketsOfLane; ++i) {
      if (mine && bucket / 32 == i) of_buckets_[i] += sum;
    }
  }

  // Switches to another bucket, for runs that have one.
  __device__ __forceinline__ void TurnTo(int bucket) {
    if (bucket == bucket_) return;
    if (bucket_ >= 0) AddToBucket(bucket_, SumOfWarp(sum_));
    bucket_ = bucket, sum_ = 0.0f;
  }

  // Sums for each bucket from `least` to `greatest` those of the numbers that have it.
  template <class Bias>
  __device__ __forceinline__ void AddFew(const Bias& bias, int square, int least, int greatest,
                                         const float (&of_scores)[kStripNumbers]) {
    // Word 2 s + i has the buckets of row i in the square s: byte 2 j + e that of number 8 s + 4 j
    // + 2 i + e.
    static_assert(Bias::kOwnRows);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t halves = MapByte<true>(0, lane) == 0 ? 0x5410 : 0x7632;
    uint32_t words[kStripNumbers / 4];
#pragma unroll
    for (int s = 0; s < kSquares; ++s) {
      const uint4 unit = bias.Units(square, 0)[MapUnit<true>(square % kSquares, s, lane)];
      words[2 * s] = __byte_perm(unit.x, unit.y, halves);
      words[2 * s + 1] = __byte_perm(unit.z, unit.w, halves);
    }
#pragma unroll 1
    for (int bucket = least; bucket <= greatest; ++bucket) {
      const uint32_t all = static_cast<uint32_t>(bucket) * 0x01010101u;
      float sums[4] = {};
#pragma unroll
      for (int word = 0; word < kStripNumbers / 4; ++word) {
        const uint32_t differ = words[word] ^ all;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int number = 8 * (word / 2) + i / 2 * 4 + word % 2 * 2 + i % 2;
          if ((differ & 0xFFu << (8 * i)) == 0) sums[i] += of_scores[number];
        }
      }
      AddToBucket(bucket, SumOfWarp((sums[0] + sums[1]) + (sums[2] + sums[3])));
    }
  }

  // Adds numbers to their buckets in shared memory, as integers: atomic additions of integers give
  // the same bits in any order. The greatest number sets their unit, 2^-19 of it at most. With less
  // room than buckets, it goes through them kRoom at a time.
  template <int kRoom, class Bias>
  __device__ __forceinline__ void AddMany(const Bias& bias, int square, int least, int greatest,
                                          const float (&of_scores)[kStripNumbers], int* room) {
    constexpr bool kAll = kRoom >= kMostBuckets;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float most = 0.0f;
#pragma unroll
    for (const float x : of_scores) most = fmaxf(most, fabsf(x));
    // 2^20 times 1,024 numbers don't overflow. Tiny numbers take the least unit that has an
    // inverse.
    constexpr int kBits = 20, kLeast = 24;
    const int exponent = max(__reduce_max_sync(0xFFFFFFFFu, __float_as_int(most)) >> 23, kLeast);
    const float scale = __int_as_float((253 + kBits - exponent) << 23),
                unit = __int_as_float((exponent + 1 - kBits) << 23);
    const bool infinite = exponent == 255;
    for (int first = kAll ? 0 : least; first <= (kAll ? 0 : greatest); first += kRoom) {
      const auto place_of = [&](int bucket) { return static_cast<unsigned>(bucket - first); };
      for (int i = lane; i < kRoom; i += 32) room[i] = 0;
      __syncwarp();
      ForBuckets(bias, square, 0, [&](int number, uint32_t bucket) {
        constexpr float kWhole = 0x1.8p23f;  // numbers beside it are whole
        const float at = fmaf(of_scores[number], scale, kWhole);
        const unsigned place = place_of(static_cast<int>(bucket));
        if (kAll || place < kRoom) {
          atomicAdd(room + place, __float_as_int(at) - __float_as_int(kWhole));
        }
      });
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBucketsOfLane; ++i) {
        const unsigned place = place_of(lane + 32 * i);
        if (!kAll && place >= kRoom) continue;
        of_buckets_[i] += infinite ? NAN : unit * static_cast<float>(room[place]);
        room[place] = 0;
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ float SumOf(const float (&numbers)[kStripNumbers]) {
    float sums[kStripNumbers / 4];
#pragma unroll
    for (int i = 0; i < kStripNumbers / 4; ++i) {
      sums[i] = (numbers[4 * i] + numbers[4 * i + 1]) + (numbers[4 * i + 2] + numbers[4 * i + 3]);
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }

  int bucket_ = -1;  // of the last run that has one; sum_ is its, of the thread
  float sum_ = 0.0f;
  float (&of_buckets_)[kBucketsOfLane];
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_BUCKET_SUMS_CUH_
