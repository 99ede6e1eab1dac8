// The bias that the GPU adds to scores for the distance of two tokens, in places and in time
// (relative_bias.h; all heads share the tables).
//
// Scores start from the bias: a product of the matrix units adds to the numbers already in its
// registers, and alpha (q k + b / alpha) = alpha q k + b. So the bias can be computed beside other
// products, and nothing has to be stored for it.
//
// Places. A thread holds numbers of two own tokens, 8 apart, and of pairs of other tokens
// (wgmma.cuh). Moving 8 further in both directions leaves the distance the same, so two rows of
// numbers read little more of the table than one row does, and the first cache has the table. If
// all distances are within the table, which fails only for distances longer than it, their
// addresses differ by constants.
//
// Times. The cost is in instructions: a score leaves room for few beyond those that it needs
// anyway. So differences are doubles, whose absolute value is free and whose upper word contains
// the key (time_buckets.h). Each key has an entry of 16 bytes: where the next bucket starts, what
// to add before that start and what from it on. A block of threads makes the 256 entries in shared
// memory when it begins. At width 256 the gradients' tiles leave no room for them, and the entry is
// put together from global memory for each number. A difference is exact up to 2^53. A larger one
// is rounded to 53 bits, and may then fall into the neighbouring bucket if it is within 2^-53 of
// that bucket's start.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/time_buckets.h"

namespace gmeta::hstu {

// Where buckets start, from the second on, with infinity behind the last; and for each key the
// bucket of its smallest number.
struct TimeTable {
  double starts[kMostBuckets];
  uint8_t of_key[kTimeKeys];
};

// The starting value of the scores of a key: before `start` and from it on.
struct alignas(16) TimeEntry {
  double start;
  float before, after;
};

// The offset of a key's entry, in bytes from the first entry.
using EntryPlace = uint32_t;

// A bias; pointers to absent parts are null.
struct GpuBias {
  const float* positions;  // (2n - 1)
  int n;
  const float* time_buckets;
  int buckets;
  const TimeTable* table;
  const int64_t* row_times;
  const int64_t* column_times;
  int last_token;  // last token of the batch
  float factor;    // 1 / alpha

  // Tokens behind the batch's last one get its time: their scores are masked.
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

// The entries of a block of threads, if its kernel is biased and has room for them.
template <bool kThere>
struct TimeEntries {
  TimeEntry of_key[kTimeKeys];
  uint8_t buckets[kTimeKeys];

  // Fills the entries. All threads call it, and synchronize before any of them uses a bias.
  __device__ __forceinline__ void Make(const GpuBias& bias) {
    if (bias.time_buckets == nullptr) return;
    for (int key = static_cast<int>(threadIdx.x); key < kTimeKeys; key += blockDim.x) {
      of_key[key] = bias.EntryOf(key);
      buckets[key] = static_cast<uint8_t>(bias.BucketOf(key));
    }
  }
  __device__ __forceinline__ TimeEntry At(const GpuBias&, EntryPlace place) const {
    // One read of the whole entry, not one for each member where it is needed.
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

// Returns the place of a difference's entry. 0 has the place of 1.
__device__ __forceinline__ EntryPlace PlaceOf(double difference) {
  static_assert(sizeof(TimeEntry) == 16);
  constexpr uint32_t kShift = 20 - kKeyBits - 4, kOne = 1023u << (kKeyBits + 4);
  constexpr uint32_t kMask = (2048u << (kKeyBits + 4)) - 16;  // leaves out the sign
  const auto upper = static_cast<uint32_t>(__double2hiint(difference));
  return max(upper >> kShift & kMask, kOne) - kOne;
}

// Returns a - b, subtracted as 64-bit integers first: only the difference may be rounded.
__device__ __forceinline__ double TimeBetween(int64_t a, int64_t b) {
  return static_cast<double>(
      static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)));
}

// Sets scores = b / alpha for a thread's numbers of a product. Number 4 j + 2 i + e belongs to the
// own token `own` + 8 i and the other token `other` + 8 j + e, places in the sequence that begins
// at `token`. kOwnRows: own tokens are rows, the others columns; else the reverse. If there are
// times, it calls kept(number, its entry's place, whether it is at or behind the start).
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
  // Distances differ from the first number's by `of_other - of_own`, or by its negative.
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

// Ignores what BeginWithBias says of times.
struct KeepNothing {
  __device__ __forceinline__ void operator()(int, EntryPlace, bool) const {}
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_CUH_
