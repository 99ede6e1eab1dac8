// The bucket of a difference of times, on all devices.
//
// A bucket of time is floor(ln(max(|t|, 1)) / 0.301), at most 128. No logarithm is computed: the
// caller gives the smallest difference of each bucket, as integers, so all machines and all
// implementations agree. Those are 35% apart. Numbers of one key share their exponent and the first
// two bits of their mantissa, so they are less than 25% apart. So at most one bucket starts after
// a key's smallest number. A table gives the bucket of that number, and one comparison gives the
// right bucket.

#ifndef GMETA_OPS_ATTENTION_TIME_BUCKETS_H_
#define GMETA_OPS_ATTENTION_TIME_BUCKETS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/host_device.h"

namespace gmeta::hstu {

inline constexpr int kKeyBits = 2;                      // bits of the mantissa
inline constexpr int kTimeKeys = 64 * (1 << kKeyBits);  // keys of numbers from 1 to 2^64
inline constexpr int kMostBuckets = 256;
inline constexpr uint64_t kNever = UINT64_MAX;  // start of a bucket that doesn't exist

// Returns the distance between two times, at most 2^63.
GMETA_HOST_DEVICE inline uint64_t Apart(int64_t difference) {
  return difference < 0 ? 0 - static_cast<uint64_t>(difference) : static_cast<uint64_t>(difference);
}

// Returns the key of a number; the key of 0 is 0.
GMETA_HOST_DEVICE inline int KeyOf(uint64_t apart) {
  if (apart == 0) return 0;
#if defined(__CUDA_ARCH__)
  const int zeros = __clzll(static_cast<int64_t>(apart));
#else
  const int zeros = __builtin_clzll(apart);
#endif
  return (63 - zeros) << kKeyBits |
         static_cast<int>(apart << zeros >> (63 - kKeyBits) & ((1 << kKeyBits) - 1));
}

// Returns the smallest number of a key.
GMETA_HOST_DEVICE inline uint64_t SmallestOfKey(int key) {
  const int exponent = key >> kKeyBits;
  const uint64_t mantissa = (1 << kKeyBits) + key % (1 << kKeyBits);
  return exponent < kKeyBits ? mantissa >> (kKeyBits - exponent)
                             : mantissa << (exponent - kKeyBits);
}

// Returns the bucket of a key's smallest number: how many of `size` starts, not decreasing, are at
// most that number.
GMETA_HOST_DEVICE inline uint8_t BucketOfKey(int key, const int64_t* starts, int size) {
  const uint64_t smallest = SmallestOfKey(key);
  int low = 0, high = size;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (static_cast<uint64_t>(starts[middle]) <= smallest) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<uint8_t>(low);
}

// Returns whether a table of keys works for buckets with these starts: positive numbers, not
// decreasing, and at most one start after each key's smallest number.
inline bool AreTimeBuckets(const int64_t* starts, size_t size) {
  if (size >= kMostBuckets) return false;
  int before = -1;  // the last key with a start after its smallest number
  for (size_t i = 0; i < size; ++i) {
    if (starts[i] < (i == 0 ? 1 : starts[i - 1])) return false;
    const auto start = static_cast<uint64_t>(starts[i]);
    const int key = KeyOf(start);
    if (start == SmallestOfKey(key)) continue;
    if (key == before) return false;
    before = key;
  }
  return true;
}

// Finds buckets on a CPU.
class TimeBuckets {
 public:
  // Takes the smallest difference of each bucket from the second on, for which AreTimeBuckets
  // holds.
  TimeBuckets(const int64_t* starts, size_t size) : starts_(starts, starts + size) {
    starts_.push_back(kNever);
    for (int key = 0; key < kTimeKeys; ++key) {
      of_key_.push_back(BucketOfKey(key, starts, static_cast<int>(size)));
    }
  }

  size_t buckets() const { return starts_.size(); }

  uint8_t Of(int64_t difference) const {
    const uint64_t apart = Apart(difference);
    const uint8_t found = of_key_[static_cast<size_t>(KeyOf(apart))];
    return static_cast<uint8_t>(found + (apart >= starts_[found]));
  }

 private:
  std::vector<uint64_t> starts_;
  std::vector<uint8_t> of_key_;
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_TIME_BUCKETS_H_
