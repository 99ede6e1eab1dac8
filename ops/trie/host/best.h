// Best: the k children of the highest rank out of many that come one after another.
//
// Children are collected, and cut to the k best when there are twice as many. For a cut the rank of
// the k-th is found by halving the range of ranks, and counting in vectors how many lie above the
// middle; as soon as these are k, it is found. Ranks are stored as integers of the same order, so
// that the middle is one. That takes a tenth of the time of std::nth_element, which mispredicts
// each second comparison.
//
// Equal ranks are ordered by SplitMix64 of the node, the smaller first, and those of one node by
// the beam.

#ifndef GMETA_OPS_TRIE_HOST_BEST_H_
#define GMETA_OPS_TRIE_HOST_BEST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/common/splitmix.h"
#include "ops/trie/host/siblings.h"
#include "ops/trie/level.h"

namespace gmeta::trie {

// Finds a number that k of n keys reach, or, if some are equal, as few more as possible. n is of
// whole lanes, k at most n.
GMETA_ALWAYS_INLINE void KthLanes(const int32_t* keys, size_t n, size_t k, int32_t* kth,
                                  size_t* not_below) {
  using Keys = hstu::Integers<kLanes>;
  int64_t least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
  size_t count_of_least = n;
  while (least < most && count_of_least != k) {
    const int64_t middle = least + (most - least + 1) / 2;
    const int32_t bar = static_cast<int32_t>(middle);
    Keys counts{};
    for (size_t i = 0; i < n; i += kLanes) {
      Keys here;
      std::memcpy(&here, keys + i, sizeof(here));
      counts -= here >= bar;
    }
    size_t count = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) count += static_cast<size_t>(counts[lane]);
    if (count >= k) {
      least = middle, count_of_least = count;
    } else {
      most = middle - 1;
    }
  }
  *kth = static_cast<int32_t>(least);
  *not_below = count_of_least;
}
GMETA_VECTOR_VERSIONS(Kth, KthLanes,
                      (const int32_t* keys, size_t n, size_t k, int32_t* kth, size_t* not_below),
                      (keys, n, k, kth, not_below))

class Best {
 public:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  struct Child {
    float score = kNone;
    int32_t beam = -1;
    int64_t node = -1;
  };

  explicit Best(size_t k) : k_(k) {}

  void Clear() {
    count_ = 0;
    least_ = kNone;
  }
  // Below this rank no child is among the k best.
  float least() const { return least_; }

  // Makes room for this many more children.
  void Expect(size_t more) {
    if (count_ >= 2 * k_) Cut();
    const size_t room = (count_ + more + kLanes - 1) / kLanes * kLanes;
    if (keys_.size() < room) keys_.resize(2 * room), children_.resize(2 * room);
  }
  void Add(float rank, const Child& child) {
    keys_[count_] = KeyOf(rank);
    children_[count_++] = child;
  }

  // Cuts to the k best and orders them. They are then child(0), child(1), ...
  void Finish() {
    if (count_ > k_) Cut();
    order_.resize(count_);
    for (size_t i = 0; i < count_; ++i) {
      order_[i] = static_cast<uint64_t>(~Unsigned(keys_[i])) << 32 | i;
    }
    std::sort(order_.begin(), order_.end());
    for (size_t i = 1; i < count_; ++i) {
      if (order_[i] >> 32 != order_[i - 1] >> 32) continue;
      size_t end = i;
      while (end < count_ && order_[end] >> 32 == order_[i] >> 32) ++end;
      std::sort(order_.begin() + static_cast<int64_t>(i) - 1,
                order_.begin() + static_cast<int64_t>(end), [&](uint64_t a, uint64_t b) {
                  return IsFirst(children_[static_cast<uint32_t>(a)],
                                 children_[static_cast<uint32_t>(b)]);
                });
      i = end - 1;
    }
  }
  size_t count() const { return count_; }
  const Child& child(size_t i) const { return children_[static_cast<uint32_t>(order_[i])]; }
  float rank(size_t i) const { return RankOf(keys_[static_cast<uint32_t>(order_[i])]); }

 private:
  static int32_t KeyOf(float rank) {
    rank += 0.0f;  // -0 and 0 are equal
    int32_t bits;
    std::memcpy(&bits, &rank, sizeof(bits));
    return bits ^ (bits >> 31 & 0x7fffffff);
  }
  static float RankOf(int32_t key) {
    const int32_t bits = key ^ (key >> 31 & 0x7fffffff);
    float rank;
    std::memcpy(&rank, &bits, sizeof(rank));
    return rank;
  }
  static uint32_t Unsigned(int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; }

  static bool IsFirst(const Child& a, const Child& b) {
    const uint64_t hash_a = SplitMix64(static_cast<uint64_t>(a.node));
    const uint64_t hash_b = SplitMix64(static_cast<uint64_t>(b.node));
    return hash_a != hash_b ? hash_a < hash_b : a.beam < b.beam;
  }

  // Keeps the k best of more.
  void Cut() {
    const size_t whole = (count_ + kLanes - 1) / kLanes * kLanes;
    if (keys_.size() < whole) keys_.resize(whole), children_.resize(whole);
    std::fill(keys_.begin() + static_cast<int64_t>(count_),
              keys_.begin() + static_cast<int64_t>(whole), std::numeric_limits<int32_t>::min());
    int32_t kth;
    size_t not_below;
    Kth(keys_.data(), whole, k_, &kth, &not_below);
    if (not_below > k_) {
      // Some ranks equal the k-th: of these the first by their hashes are kept.
      ties_.clear();
      for (size_t i = 0; i < count_; ++i) {
        if (keys_[i] == kth) ties_.push_back(children_[i]);
      }
      std::sort(ties_.begin(), ties_.end(), IsFirst);
      size_t kept = 0;
      for (size_t i = 0; i < count_; ++i) {
        const bool keep = keys_[i] > kth;
        keys_[kept] = keys_[i], children_[kept] = children_[i];
        kept += keep ? 1 : 0;
      }
      for (size_t i = 0; kept < k_; ++i) keys_[kept] = kth, children_[kept++] = ties_[i];
    } else {
      size_t kept = 0;
      for (size_t i = 0; i < count_; ++i) {
        const bool keep = keys_[i] >= kth;
        keys_[kept] = keys_[i], children_[kept] = children_[i];
        kept += keep ? 1 : 0;
      }
    }
    count_ = k_;
    least_ = RankOf(kth);
  }

  const size_t k_;
  size_t count_ = 0;
  float least_ = kNone;
  std::vector<int32_t> keys_;  // of children, and more room
  std::vector<Child> children_, ties_;
  std::vector<uint64_t> order_;
};

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_BEST_H_
