// MTGenRec's algorithm 1: a stream of sequences cut into batches of about equal cost.
//
// A batch of so many sequences is a batch of any number of tokens, and the rank with the most of
// them is the one that all others wait for. So each rank makes batches of about equal cost, of as
// many sequences as that takes. Sequences wait in a queue; while they cost less than the target
// another one is taken in; then the prefix whose cost is closest to the target is a batch:
//
//     costs    3  4 | 5  1 | 9 | 2          target 8
//     sums     3  7   12              the prefix of 2 costs 7, of 3 costs 12: 7 is closer
//
// Three things that the paper leaves open. A batch has at least one sequence, or one above twice
// the target would wait for ever. What waits at the end of the stream is a batch, whatever it
// costs. Of two equally close prefixes the longer one is taken.
//
// Costs are F(L) = linear * L + quadratic * L^2 of a sequence's L tokens; (1, 0) balances tokens,
// the FLOPs of a layer's two parts balance time. A cap on tokens bounds a batch's memory: one
// sequence alone may pass it. A cap on what counts of a sequence is for who computes no more of it.
//
// The cut is a function of the stream from the cursor on. Prefixes beyond the first that reaches
// the target only lie further from it, so what else waits in the queue has no part in it, and where
// a stream stands is one number: no queue has to be saved. gmeta/testing/reference/io/balance.py
// says the same in Python.

#ifndef GMETA_IO_BALANCE_PREFIX_BATCHER_H_
#define GMETA_IO_BALANCE_PREFIX_BATCHER_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>

namespace gmeta::balance {

struct BatchCost {
  double linear = 1;
  double quadratic = 0;
  double target = 0;
  int64_t max_tokens = 0;  // of a batch; 0: any number
  int64_t longest = 0;     // of a sequence, so many tokens count; 0: all

  double Of(int64_t tokens) const {
    const auto length = static_cast<double>(tokens);
    return linear * length + quadratic * length * length;
  }
};

class PrefixBatcher {
 public:
  explicit PrefixBatcher(const BatchCost& cost) : cost_(cost) {}

  // Whether another sequence is needed before a batch can be cut, if there is one.
  bool hungry() const { return waiting_ < cost_.target; }
  bool empty() const { return queue_.empty(); }

  void Push(int64_t tokens) {
    if (cost_.longest > 0) tokens = std::min(tokens, cost_.longest);
    queue_.push_back(tokens);
    waiting_ += cost_.Of(tokens);
  }

  // Takes a batch off the queue, which isn't empty, and says how many sequences it has.
  size_t Cut() {
    size_t best = 1;
    double sum = 0, distance = std::numeric_limits<double>::infinity();
    int64_t tokens = 0;
    for (size_t count = 1; count <= queue_.size(); ++count) {
      sum += cost_.Of(queue_[count - 1]);
      tokens += queue_[count - 1];
      const double own = std::abs(sum - cost_.target);
      const bool too_many = cost_.max_tokens > 0 && tokens > cost_.max_tokens;
      if (count > 1 && (own > distance || too_many)) break;
      best = count;
      distance = own;
    }
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(best));
    // Summed anew: a stream that begins here sums up the same, to the last bit.
    waiting_ = 0;
    for (const int64_t left : queue_) waiting_ += cost_.Of(left);
    return best;
  }

 private:
  const BatchCost cost_;
  std::deque<int64_t> queue_;
  double waiting_ = 0;
};

}  // namespace gmeta::balance

#endif  // GMETA_IO_BALANCE_PREFIX_BATCHER_H_
