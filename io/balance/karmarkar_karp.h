// Assigns sequences to ranks so that the ranks' costs are as equal as a quick method can make them:
// the largest differencing method of Karmarkar and Karp (1982), for any number of parts.
//
// What it does. A split is some of the sequences, divided into as many parts as there are ranks.
// Each sequence begins as a split of its own, in which one part has it and the other parts are
// empty. The two most uneven splits are joined: the dearest part of one with the cheapest of the
// other, the second dearest with the second cheapest, and so on. This repeats until one split is
// left. Joining subtracts two splits from each other, so nothing stays uneven for long: in the end
// parts differ by at most the dearest sequence, and for many sequences of varied costs by a tiny
// part of it. Giving the dearest sequence to the least loaded rank, again and again, has the same
// bound, but ends at about the cheapest sequence.
//
// Layout. A part is a chain of sequences in one array of links, `next`, so one write joins two
// parts. A split is its parts in descending order of cost, but only as many of them as can have
// sequences. The others are empty, cost nothing, and count as the last. A sequence that hasn't been
// joined with another has no storage at all. The heap has (unevenness, number) of each split. The
// number of a single sequence is its index; joined splits are numbered on from there.
//
// Invariants. The parts of all splits in the heap are disjoint chains, and together contain all
// sequences. No two splits have the same number, so the heap's order is total. Parts of equal cost
// keep their previous order. So the result is a function of the costs alone, the same on each rank,
// and the same as that of `karmarkar_karp` in tests/support/reference/balance.py; a test
// compares the two. Costs are never negative, so an empty part is never dearer than one with
// sequences, which is why it can be left out. If a cost is zero, an empty part can be as dear, and
// its place matters, so nothing is left out then.
//
// Why it is fast. n sequences take n - 1 joins, each with a few steps of the heap, O(log n).
// Joining splits of a and b parts sorts min(a + b, ranks) of them. If costs are alike, sequences
// are joined in pairs, pairs in fours, and so on: only one join in as many as there are ranks sorts
// that many parts, and all together take O(n log n). At worst it is O(n (log n + ranks log ranks)),
// which full splits would always take.

#ifndef GMETA_IO_BALANCE_KARMARKAR_KARP_H_
#define GMETA_IO_BALANCE_KARMARKAR_KARP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

namespace gmeta {
namespace balance {

class KarmarkarKarp {
 public:
  // Requires finite costs of at least 0, and at least one rank.
  KarmarkarKarp(const double* costs, size_t n, int32_t ranks)
      : costs_(costs), n_(n), ranks_(static_cast<size_t>(ranks)), next_(n, kNone) {
    least_parts_ = std::find(costs, costs + n, 0.0) == costs + n ? 1 : ranks_;
  }

  // Writes the rank of each sequence. Ranks without sequences come first, the others in the order
  // of their first sequence.
  void Deal(int32_t* rank_of) {
    if (n_ == 0) return;
    std::vector<Entry> entries;
    entries.reserve(n_);
    for (size_t i = 0; i < n_; ++i) {
      entries.push_back({ranks_ == 1 ? 0.0 : costs_[i], static_cast<int64_t>(i), kSingle});
    }
    std::priority_queue<Entry, std::vector<Entry>, Later> heap(Later(), std::move(entries));
    int64_t number = static_cast<int64_t>(n_);
    while (heap.size() > 1) {
      const Entry first = heap.top();
      heap.pop();
      const Entry second = heap.top();
      heap.pop();
      const int32_t joined = Join(first, second);
      heap.push({Unevenness(splits_[joined]), number++, joined});
    }
    Number(Parts(heap.top()), rank_of);
  }

 private:
  static constexpr int32_t kNone = -1;    // after the last sequence of a part
  static constexpr int32_t kSingle = -1;  // the split of one sequence, which has no storage

  struct Part {
    double cost = 0.0;
    int32_t first = kNone;
    int32_t last = kNone;
  };
  using Split = std::vector<Part>;

  struct Entry {
    double unevenness;
    int64_t number;
    int32_t split;
  };

  struct Later {
    bool operator()(const Entry& a, const Entry& b) const {
      return a.unevenness != b.unevenness ? a.unevenness < b.unevenness : a.number > b.number;
    }
  };

  double Unevenness(const Split& split) const {
    return split.front().cost - (split.size() == ranks_ ? split.back().cost : 0.0);
  }

  Split Parts(const Entry& entry) {
    if (entry.split != kSingle) return std::move(splits_[entry.split]);
    Split parts(least_parts_);
    const int32_t sequence = static_cast<int32_t>(entry.number);
    parts[0] = {costs_[sequence], sequence, sequence};
    return parts;
  }

  // Returns where to store a joined split: in the place of one of the two, or in a new one.
  int32_t Place(const Entry& a, const Entry& b) {
    if (a.split != kSingle && b.split != kSingle) free_.push_back(b.split);
    if (a.split != kSingle) return a.split;
    if (b.split != kSingle) return b.split;
    if (free_.empty()) {
      splits_.emplace_back();
      return static_cast<int32_t>(splits_.size() - 1);
    }
    const int32_t place = free_.back();
    free_.pop_back();
    return place;
  }

  int32_t Join(const Entry& a, const Entry& b) {
    const Split first = Parts(a);
    const Split second = Parts(b);
    Split joined = first;
    joined.resize(std::min(first.size() + second.size(), ranks_));
    // The cheapest part of the second split meets the dearest of the first, so count from the other
    // end.
    for (size_t i = 0; i < second.size(); ++i) {
      joined[joined.size() - 1 - i] = Chained(joined[joined.size() - 1 - i], second[i]);
    }
    std::stable_sort(joined.begin(), joined.end(),
                     [](const Part& x, const Part& y) { return x.cost > y.cost; });
    const int32_t place = Place(a, b);
    splits_[place] = std::move(joined);
    return place;
  }

  Part Chained(const Part& a, const Part& b) {
    if (a.first == kNone) return {a.cost + b.cost, b.first, b.last};
    if (b.first == kNone) return {a.cost + b.cost, a.first, a.last};
    next_[a.last] = b.first;
    return {a.cost + b.cost, a.first, b.last};
  }

  void Number(const Split& parts, int32_t* rank_of) const {
    std::vector<std::pair<int32_t, int32_t>>
        order;  // each part's least sequence, and the first in its chain
    for (const Part& part : parts) {
      if (part.first == kNone) continue;
      int32_t least = part.first;
      for (int32_t i = part.first; i != kNone; i = next_[i]) least = std::min(least, i);
      order.emplace_back(least, part.first);
    }
    std::sort(order.begin(), order.end());
    int32_t rank = static_cast<int32_t>(ranks_ - order.size());
    for (const auto& [least, first] : order) {
      for (int32_t i = first; i != kNone; i = next_[i]) rank_of[i] = rank;
      ++rank;
    }
  }

  const double* costs_;
  const size_t n_;
  const size_t ranks_;
  size_t least_parts_;
  std::vector<int32_t> next_;  // for each sequence, the next one in its part
  std::vector<Split> splits_;
  std::vector<int32_t> free_;
};

}  // namespace balance
}  // namespace gmeta

#endif  // GMETA_IO_BALANCE_KARMARKAR_KARP_H_
