// MTGenRec's algorithm 1: cuts a stream of sequences into batches of about equal cost.
//
// A batch with a fixed number of sequences can have any number of tokens, and all ranks wait for
// the rank with the most tokens. So each rank makes batches of about equal cost, with as many
// sequences as that takes. Sequences wait in a queue. While they cost less than the target, another
// one is added; then the prefix whose cost is closest to the target becomes a batch:
//
//     costs    3  4 | 5  1 | 9 | 2          target 8
//     sums     3  7   12              the prefix of 2 costs 7, of 3 costs 12: 7 is closer
//
// The paper leaves three things open. A batch has at least one sequence; otherwise a sequence above
// twice the target would wait forever. The sequences left at the end of the stream form a batch,
// whatever they cost. If two prefixes are equally close, the longer one is taken.
//
// Costs are F(L) = linear * L + quadratic * L^2 of a sequence's L tokens; (1, 0) balances tokens,
// the FLOPs of a layer's two parts balance time. A cap on a batch's tokens bounds its memory; only
// a single sequence may exceed it. A cap on a sequence's counted tokens is for models that truncate
// sequences.
//
// The cut is a function of the stream from the cursor on. Prefixes beyond the first that reaches
// the target are only further from it, so the rest of the queue doesn't affect the cut. One number
// is the whole state of a stream: no queue has to be saved. tests/support/reference/balance.py
// does the same in Python.

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
  int64_t max_tokens = 0;  // most tokens in a batch; 0: any number
  int64_t longest = 0;     // most tokens of a sequence that count; 0: all

  double Of(int64_t tokens) const {
    const auto length = static_cast<double>(tokens);
    return linear * length + quadratic * length * length;
  }
};

class PrefixBatcher {
 public:
  explicit PrefixBatcher(const BatchCost& cost) : cost_(cost) {}

  // Returns whether a batch needs another sequence before it can be cut, if there is one.
  bool hungry() const { return waiting_ < cost_.target; }
  bool empty() const { return queue_.empty(); }

  // Adds a sequence of `tokens`, at most `longest` of which count, and of `more`, which all count.
  void Push(int64_t tokens, int64_t more = 0) {
    if (cost_.longest > 0) tokens = std::min(tokens, cost_.longest);
    tokens += more;
    queue_.push_back(tokens);
    waiting_ += cost_.Of(tokens);
  }

  // Removes a batch from the queue, which must not be empty, and returns its number of sequences.
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
    // Recompute the sum: a stream that begins here gets the same sum, bit for bit.
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
