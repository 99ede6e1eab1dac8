// What the GPU adds to scores for how far apart two tokens are, in places and in time
// (relative_bias.h; the tables are shared by heads).
//
// A thread adds it to the numbers of a product that it holds (wgmma.cuh): of two own tokens, 8
// apart, and pairs of others. The tables lie in global memory: of a block's numbers most are of few
// distances and few buckets, which the first cache has. Times are read where they are used, once
// for two numbers.

#ifndef GMETA_OPS_HSTU_ATTENTION_GPU_BIAS_CUH_
#define GMETA_OPS_HSTU_ATTENTION_GPU_BIAS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/hstu_attention/time_buckets.h"

namespace gmeta::hstu {

// The buckets' smallest differences, and which bucket a key's smallest number is of.
struct TimeTable {
  int64_t starts[kMostBuckets];  // behind the last, INT64_MAX
  uint8_t of_key[kTimeKeys];
};

// Null pointers for what is absent.
struct GpuBias {
  const float* positions;  // (2n - 1)
  int n;
  const float* time_buckets;
  const TimeTable* table;
  const int64_t* row_times;
  const int64_t* column_times;
  int last_token;  // of the batch

  // Where the bias of `column - row` stands among positions.
  __device__ __forceinline__ int Place(int distance) const {
    return min(max(distance + n - 1, 0), 2 * n - 2);
  }
  // Tokens behind the batch's last have its time: their scores are masked.
  __device__ __forceinline__ int64_t Time(const int64_t* times, int token) const {
    return __ldg(times + min(token, last_token));
  }
  __device__ __forceinline__ int Bucket(int64_t difference) const {
    const uint64_t apart = Apart(difference);
    // Towards zero, so that a number has no greater one's key.
    const float x = apart >> 32 == 0 ? __uint2float_rz(max(static_cast<uint32_t>(apart), 1u))
                                     : __ull2float_rz(apart);
    const int key = static_cast<int>(__float_as_uint(x) >> (23 - kKeyBits)) - (127 << kKeyBits);
    return BucketOf(apart, key, table->of_key, table->starts);
  }
};

// scores = half scores + bias / 2 of a thread's numbers of a product: score 4 j + 2 i + e is of the
// own token `own` + 8 i and the other one `other` + 8 j + e, places in the sequence that begins at
// `token`. kOwnRows: own tokens are rows, the others columns; else the reverse. kept(number,
// bucket) is told of the buckets of times, if there are such.
template <bool kOwnRows, int kNumbers, class Keep>
__device__ __forceinline__ void AddHalfBias(const GpuBias& bias, int token, int own, int other,
                                            float half, float (&scores)[kNumbers],
                                            const Keep& kept) {
  if (bias.positions == nullptr) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) scores[i] *= half;
  } else {
    const int apart = kOwnRows ? other - own : own - other;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const int of_own = i / 2 % 2 * 8, of_other = i / 4 * 8 + i % 2;
      const int distance = kOwnRows ? apart + of_other - of_own : apart + of_own - of_other;
      scores[i] = fmaf(half, scores[i], 0.5f * __ldg(bias.positions + bias.Place(distance)));
    }
  }
  if (bias.time_buckets == nullptr) return;
  const int64_t* const of_own = kOwnRows ? bias.row_times : bias.column_times;
  const int64_t* const of_other = kOwnRows ? bias.column_times : bias.row_times;
  const int64_t own_times[2] = {bias.Time(of_own, token + own), bias.Time(of_own, token + own + 8)};
#pragma unroll
  for (int pair = 0; pair < kNumbers / 2; ++pair) {
    const int j = pair / 2, e = pair % 2;
    const int64_t time = bias.Time(of_other, token + other + 8 * j + e);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = 4 * j + 2 * i + e;
      const int bucket = bias.Bucket(own_times[i] - time);
      scores[number] = fmaf(0.5f, __ldg(bias.time_buckets + bucket), scores[number]);
      kept(number, bucket);
    }
  }
}

template <bool kOwnRows, int kNumbers>
__device__ __forceinline__ void AddHalfBias(const GpuBias& bias, int token, int own, int other,
                                            float half, float (&scores)[kNumbers]) {
  AddHalfBias<kOwnRows>(bias, token, own, other, half, scores, [](int, int) {});
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_HSTU_ATTENTION_GPU_BIAS_CUH_
