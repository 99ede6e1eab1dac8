// What the GPU adds to scores for how far apart two tokens are, in places and in time
// (relative_bias.h; the tables are shared by heads).
//
// Scores begin with it: a product of the matrix units adds to numbers that are there, and
// alpha (q k + b / alpha) = alpha q k + b. So what a bias takes can run beside other products, and
// nothing has to be kept for it.
//
// Places. A thread holds numbers of two own tokens, 8 apart, and of pairs of others (wgmma.cuh). A
// distance is that of the numbers 8 further on in both directions, so two rows of numbers need
// little more than one from the table, which the first cache has. Where all are within the table,
// as they are but for ways longer than it, their addresses differ by constants.
//
// Times. What costs is instructions: a score has room for few beside those that it needs anyhow.
// So differences are doubles, whose absolute value is free and whose upper word has the key
// (time_buckets.h), and a key has an entry of 16 bytes: where the next bucket starts, and what is
// added before it and from it on. A block of threads makes the 256 entries in shared memory when
// it begins; at width 256, where the gradients' tiles leave no room for them, they are put together
// from global memory for each number. A difference is exact up to 2^53; beyond it is rounded to 53
// bits, and may then be of the neighbour's bucket if it is within 2^-53 of where that starts.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/time_buckets.h"

namespace gmeta::hstu {

// Where buckets start from the second on, behind the last infinity, and which one a key's smallest
// number is of.
struct TimeTable {
  double starts[kMostBuckets];
  uint8_t of_key[kTimeKeys];
};

// What the scores of a key begin with: before `start` and from it on.
struct alignas(16) TimeEntry {
  double start;
  float before, after;
};

// Where a key's entry lies, in bytes from the first one's place.
using EntryPlace = uint32_t;

// Null pointers for what is absent.
struct GpuBias {
  const float* positions;  // (2n - 1)
  int n;
  const float* time_buckets;
  int buckets;
  const TimeTable* table;
  const int64_t* row_times;
  const int64_t* column_times;
  int last_token;  // of the batch
  float factor;    // 1 / alpha

  // Tokens behind the batch's last have its time: their scores are masked.
  __device__ __forceinline__ int64_t Time(const int64_t* times, int token) const {
    return __ldg(times + min(token, last_token));
  }

  __device__ __forceinline__ int BucketOf(int key) const { return __ldg(table->of_key + key); }
  __device__ __forceinline__ TimeEntry EntryOf(int key) const {
    const int found = BucketOf(key);
    return {__ldg(table->starts + found), factor * __ldg(time_buckets + found),
            factor * __ldg(time_buckets + min(found + 1, buckets - 1))};
  }
};

// A block of threads' entries, where its kernel is biased and has room for them.
template <bool kThere>
struct TimeEntries {
  TimeEntry of_key[kTimeKeys];
  uint8_t buckets[kTimeKeys];

  // By all threads, which wait for one another before any of them begins with a bias.
  __device__ __forceinline__ void Make(const GpuBias& bias) {
    if (bias.time_buckets == nullptr) return;
    for (int key = static_cast<int>(threadIdx.x); key < kTimeKeys; key += blockDim.x) {
      of_key[key] = bias.EntryOf(key);
      buckets[key] = static_cast<uint8_t>(bias.BucketOf(key));
    }
  }
  __device__ __forceinline__ TimeEntry At(const GpuBias&, EntryPlace place) const {
    // One read, not one of each member where it is needed.
    const uint4 words =
        *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(of_key) + place);
    return {__hiloint2double(static_cast<int>(words.y), static_cast<int>(words.x)),
            __uint_as_float(words.z), __uint_as_float(words.w)};
  }
  __device__ __forceinline__ int BucketAt(const GpuBias&, EntryPlace place) const {
    return buckets[place / sizeof(TimeEntry)];
  }
};

template <>
struct TimeEntries<false> {
  __device__ __forceinline__ void Make(const GpuBias&) {}
  __device__ __forceinline__ TimeEntry At(const GpuBias& bias, EntryPlace place) const {
    return bias.EntryOf(place / sizeof(TimeEntry));
  }
  __device__ __forceinline__ int BucketAt(const GpuBias& bias, EntryPlace place) const {
    return bias.BucketOf(place / sizeof(TimeEntry));
  }
};

// The place of the entry of a difference; 0 has that of 1.
__device__ __forceinline__ EntryPlace PlaceOf(double difference) {
  static_assert(sizeof(TimeEntry) == 16);
  constexpr uint32_t kShift = 20 - kKeyBits - 4, kOne = 1023u << (kKeyBits + 4);
  constexpr uint32_t kMask = (2048u << (kKeyBits + 4)) - 16;  // the sign isn't in it
  const auto upper = static_cast<uint32_t>(__double2hiint(difference));
  return max(upper >> kShift & kMask, kOne) - kOne;
}

// a - b, as 64 bits first: what is rounded is the difference, if anything.
__device__ __forceinline__ double TimeBetween(int64_t a, int64_t b) {
  return static_cast<double>(
      static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)));
}

// scores = b / alpha of a thread's numbers of a product: number 4 j + 2 i + e is of the own token
// `own` + 8 i and the other one `other` + 8 j + e, places in the sequence that begins at `token`.
// kOwnRows: own tokens are rows, the others columns; else the reverse. kept(number, its entry's
// place, whether it is behind the start) is told of times, if there are such.
template <bool kOwnRows, int kNumbers, class Entries, class Keep>
__device__ __forceinline__ void BeginWithBias(const GpuBias& bias, const Entries& entries,
                                              int token, int own, int other,
                                              float (&scores)[kNumbers], const Keep& kept) {
  if (bias.time_buckets == nullptr) {
#pragma unroll
    for (float& score : scores) score = 0.0f;
  } else {
    const int64_t* const of_own = kOwnRows ? bias.row_times : bias.column_times;
    const int64_t* const of_other = kOwnRows ? bias.column_times : bias.row_times;
    const int64_t own_time = bias.Time(of_own, token + own);
    const double later = TimeBetween(bias.Time(of_own, token + own + 8), own_time);
#pragma unroll
    for (int pair = 0; pair < kNumbers / 2; ++pair) {
      const int j = pair / 2, e = pair % 2;
      const double between = TimeBetween(bias.Time(of_other, token + other + 8 * j + e), own_time);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int number = 4 * j + 2 * i + e;
        const double difference = i == 0 ? between : between - later;
        const EntryPlace place = PlaceOf(difference);
        const TimeEntry entry = entries.At(bias, place);
        const bool behind = fabs(difference) >= entry.start;
        scores[number] = behind ? entry.after : entry.before;
        kept(number, place, behind);
      }
    }
  }
  if (bias.positions == nullptr) return;
  // Distances rise or fall by `of_other - of_own` from the first number's on.
  constexpr int kMost = kNumbers / 4 * 8 - 7;
  const int most = 2 * bias.n - 2;
  const int first = (kOwnRows ? other - own : own - other) + bias.n - 1;
  const int low = first - (kOwnRows ? 8 : kMost), high = first + (kOwnRows ? kMost : 8);
  const auto away = [](int number) {
    const int of_own = number / 2 % 2 * 8, of_other = number / 4 * 8 + number % 2;
    return kOwnRows ? of_other - of_own : of_own - of_other;
  };
  if (__all_sync(0xFFFFFFFFu, low >= 0 && high <= most)) {
    const float* const from = bias.positions + first;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      scores[i] = fmaf(bias.factor, __ldg(from + away(i)), scores[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const int place = min(max(first + away(i), 0), most);
      scores[i] = fmaf(bias.factor, __ldg(bias.positions + place), scores[i]);
    }
  }
}

// Nothing is told of times.
struct KeepNothing {
  __device__ __forceinline__ void operator()(int, EntryPlace, bool) const {}
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_CUH_
