// The bucket of a difference of times, on all devices.
//
// A bucket of time is floor(ln(max(|t|, 1)) / 0.301), at most 128. The logarithm isn't taken: the
// caller gives the smallest difference of each bucket, as integers, so all machines and all forms
// agree. Those are 35% apart, so between two numbers that share their exponent and first 7 bits of
// mantissa, their key, there is at most one of them: a table gives the bucket of a key's smallest
// number, and one comparison the right one.

#ifndef GMETA_OPS_HSTU_ATTENTION_TIME_BUCKETS_H_
#define GMETA_OPS_HSTU_ATTENTION_TIME_BUCKETS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/common/host_device.h"

namespace gmeta::hstu {

inline constexpr int kKeyBits = 7;                      // of mantissa
inline constexpr int kTimeKeys = 64 * (1 << kKeyBits);  // of numbers from 1 to 2^64
inline constexpr int kMostBuckets = 256;

// The smallest number of a key.
GMETA_HOST_DEVICE inline int64_t SmallestOfKey(int key) {
  const int exponent = key >> kKeyBits;
  const int64_t mantissa = (1 << kKeyBits) + key % (1 << kKeyBits);
  if (exponent >= 63) return INT64_MAX;
  return exponent < kKeyBits ? mantissa >> (kKeyBits - exponent)
                             : mantissa << (exponent - kKeyBits);
}

// Its bucket: how many of `size` starts, not decreasing, are at most it.
GMETA_HOST_DEVICE inline uint8_t BucketOfKey(int key, const int64_t* starts, int size) {
  const int64_t smallest = SmallestOfKey(key);
  int low = 0, high = size;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= smallest) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<uint8_t>(low);
}

GMETA_HOST_DEVICE inline uint64_t Apart(int64_t difference) {
  return difference < 0 ? 0 - static_cast<uint64_t>(difference) : static_cast<uint64_t>(difference);
}

// `starts` are followed by INT64_MAX.
GMETA_HOST_DEVICE inline int BucketOf(uint64_t apart, int key, const uint8_t* of_key,
                                      const int64_t* starts) {
  const int found = of_key[key];
  return found + (apart >= static_cast<uint64_t>(starts[found]));
}

// On a CPU.
class TimeBuckets {
 public:
  // The smallest difference of each bucket from the first to the last, not decreasing.
  TimeBuckets(const int64_t* starts, size_t size) : starts_(starts, starts + size) {
    starts_.push_back(INT64_MAX);
    for (int key = 0; key < kTimeKeys; ++key) {
      of_key_.push_back(BucketOfKey(key, starts, static_cast<int>(size)));
    }
  }

  size_t buckets() const { return starts_.size(); }

  uint8_t Of(int64_t difference) const {
    const uint64_t apart = Apart(difference);
    if (apart < 1) return of_key_[0];
    const double x = std::fabs(static_cast<double>(difference));
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const int key = static_cast<int>((bits >> (52 - kKeyBits)) - (uint64_t{1023} << kKeyBits));
    return static_cast<uint8_t>(BucketOf(apart, key, of_key_.data(), starts_.data()));
  }

 private:
  std::vector<int64_t> starts_;
  std::vector<uint8_t> of_key_;
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_HSTU_ATTENTION_TIME_BUCKETS_H_
