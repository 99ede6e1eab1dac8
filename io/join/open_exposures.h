// The exposures that wait for their outcomes: which are open, which outcome belongs to which, and
// which rows the log of labelled examples gets next. Rows of exposures are numbered by arrival;
// what they hold is elsewhere.
//
// The log's rows come with a key, its clock, which never decreases, and with the time of their
// event, which is at most the key and may be far below it. An exposure of time t passes through
//
//     key    t .......... t + within + lateness ............ + corrections ..........
//            open          closed: its negative was written   forgotten
//
// and an outcome of time c belongs to it if t <= c < t + within + corrections. It makes a positive
// of an open one, and corrects a closed one: the negative is taken back, and the positive added.
// An outcome whose exposure isn't known waits for it, up to within + lateness + corrections of
// keys.
//
//   Order        Before each row, all that the row's key closes is closed, by (time, arrival). So
//                the output is a function of the rows alone, however they are cut into calls.
//   Queues       Exposures are closed by time, and arrive nearly by time. An exposure that isn't
//                earlier than the last one joins a queue, any other a heap; the next to close is
//                the smaller of both fronts. A log in order never touches the heap. Closed
//                exposures are forgotten by a second such pair.
//   Waiting      Outcomes wait in order of arrival, which is that of their expiry. Those of one key
//                form a chain, of which the index knows the first.
//   Memory       Of each known exposure 32 bytes, 4 in a queue, and 11 to 23 in the index; of each
//                waiting outcome 40, 4, and 11 to 23. It stays that of the most there were.
//   Rows         A row is released when no later output can need it: with its positive, when a
//                negative was closed for good, or when a closed exposure is forgotten.
//   Fingerprints A key has the fingerprint of one of n other known keys with probability n / 2^64.
//                Its exposure is then taken for a repetition. Keys of one integer never collide.

#ifndef GMETA_IO_JOIN_OPEN_EXPOSURES_H_
#define GMETA_IO_JOIN_OPEN_EXPOSURES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "io/join/fingerprint_index.h"

namespace gmeta::join {

enum class Status : uint8_t {
  kOpen = 0,
  kNegative,  // closed, and its negative was written
  kThinned,   // closed, and its negative was left out by sampling
  kPositive,  // its row is released
};

struct Exposure {
  uint64_t fingerprint;
  int64_t time;
  int64_t row;
  int32_t part;
  Status status;
};
static_assert(sizeof(Exposure) == 32, "the essay states it");

inline constexpr uint32_t kMatched = kNone - 1;  // its exposure has come

struct Waiting {
  uint64_t fingerprint;
  int64_t time;
  int64_t arrived;  // the log's key
  float label;
  int32_t part;
  uint32_t next;  // of the same fingerprint, or kNone, or kMatched
  uint32_t last;  // of the same fingerprint, if this is the first
};
static_assert(sizeof(Waiting) == 40, "the essay states it");

struct Settings {
  int64_t within = 0;
  int64_t lateness = 0;
  int64_t corrections = 0;
  double negatives = 1;  // the share that is kept
};

struct Counts {
  int64_t exposures = 0;
  int64_t outcomes = 0;
  int64_t positives = 0;
  int64_t negatives = 0;
  int64_t thinned = 0;
  int64_t corrections = 0;
  int64_t late_exposures = 0;
  int64_t repeated_exposures = 0;
  int64_t repeated_outcomes = 0;
  int64_t unmatched_outcomes = 0;
};

// Rows of the log; the calls after which they are complete are below.
struct Rows {
  size_t count;
  const int64_t* keys;
  const int64_t* times;
  const uint8_t* sides;  // 0: an exposure, otherwise an outcome
  const int32_t* parts;
  const uint64_t* fingerprints;
  const float* labels;  // of the outcomes alone
};

// What a call adds to the log of examples, and the rows that no later call needs.
struct Output {
  std::vector<int64_t> rows;
  std::vector<float> labels;
  std::vector<float> weights;
  std::vector<int64_t> released;

  void Clear() {
    rows.clear();
    labels.clear();
    weights.clear();
    released.clear();
  }

  void Write(int64_t row, float label, float weight) {
    rows.push_back(row);
    labels.push_back(label);
    weights.push_back(weight);
  }
};

// Exposures by (time, row), for those that come nearly in this order.
class TimeQueue {
 public:
  explicit TimeQueue(const Items<Exposure>& items) : items_(items) {}

  bool empty() const { return in_order_.empty() && others_.empty(); }
  size_t size() const { return in_order_.size() + others_.size(); }

  void Push(uint32_t number) {
    if (in_order_.empty() || IsBefore(in_order_.back(), number)) {
      in_order_.push_back(number);
    } else {
      others_.push_back(number);
      std::push_heap(others_.begin(), others_.end(), Later{this});
    }
  }

  uint32_t front() const {
    if (others_.empty()) return in_order_.front();
    if (in_order_.empty()) return others_.front();
    return IsBefore(in_order_.front(), others_.front()) ? in_order_.front() : others_.front();
  }

  uint32_t Pop() {
    const uint32_t number = front();
    if (!in_order_.empty() && in_order_.front() == number) {
      in_order_.pop_front();
    } else {
      std::pop_heap(others_.begin(), others_.end(), Later{this});
      others_.pop_back();
    }
    return number;
  }

  // Returns the exposure that is `ahead` places behind the front if all come in order, or null.
  const Exposure* Ahead(size_t ahead) const {
    return ahead < in_order_.size() ? &items_[in_order_[ahead]] : nullptr;
  }

  template <class Visit>
  void ForEach(Visit visit) const {
    for (const uint32_t number : in_order_) visit(items_[number]);
    for (const uint32_t number : others_) visit(items_[number]);
  }

 private:
  struct Later {
    const TimeQueue* queue;
    bool operator()(uint32_t one, uint32_t other) const { return queue->IsBefore(other, one); }
  };

  bool IsBefore(uint32_t one, uint32_t other) const {
    const Exposure &a = items_[one], &b = items_[other];
    return a.time != b.time ? a.time < b.time : a.row < b.row;
  }

  const Items<Exposure>& items_;
  std::deque<uint32_t> in_order_;
  std::vector<uint32_t> others_;  // a heap
};

class OpenExposures {
 public:
  explicit OpenExposures(const Settings& settings) : settings_(settings) {}

  OpenExposures(const OpenExposures&) = delete;
  OpenExposures& operator=(const OpenExposures&) = delete;

  // Adds rows. accepted[i] gets whether exposure i of them isn't a repetition; the accepted ones
  // are numbered on from next_row().
  void Push(const Rows& rows, uint8_t* accepted, Output* output) {
    size_t exposure = 0, outcome = 0;
    for (size_t i = 0; i < rows.count; ++i) {
      if (i + kAhead < rows.count) {
        known_.Prefetch(rows.fingerprints[i + kAhead]);
        expected_.Prefetch(rows.fingerprints[i + kAhead]);
      }
      Advance(rows.keys[i], output);
      if (rows.sides[i] == 0) {
        const bool is_new =
            AddExposure(rows.fingerprints[i], rows.keys[i], rows.times[i], rows.parts[i], output);
        accepted[exposure++] = is_new ? 1 : 0;
      } else {
        AddOutcome({rows.fingerprints[i], rows.times[i], rows.keys[i], rows.labels[outcome++],
                    rows.parts[i], kNone, kNone},
                   output);
      }
    }
  }

  // Closes and forgets everything, as a key beyond all deadlines would.
  void Finish(Output* output) {
    while (!open_.empty()) Close(open_.Pop(), output);
    while (!closed_.empty()) Forget(closed_.Pop(), output);
    while (!waiting_order_.empty()) Expire();
  }

  // Adds a known exposure of a saved state, in the order of arrival, under the next row's number.
  // Returns whether its key is new.
  bool Restore(uint64_t fingerprint, int64_t time, int32_t part, Status status) {
    const int64_t row = next_row_++;
    if (known_.Find(fingerprint) != kNone) {
      ++counts_.repeated_exposures;
      return false;
    }
    const uint32_t number = Insert({fingerprint, time, row, part, status});
    (status == Status::kOpen ? open_ : closed_).Push(number);
    return true;
  }

  // Adds a waiting outcome of a saved state, in the order of arrival.
  void RestoreWaiting(const Waiting& outcome) { Wait(outcome); }

  // Visits the known exposures in any order, and the waiting outcomes in order of arrival.
  template <class Visit>
  void ForEachExposure(Visit visit) const {
    open_.ForEach(visit);
    closed_.ForEach(visit);
  }
  template <class Visit>
  void ForEachWaiting(Visit visit) const {
    for (const uint32_t number : waiting_order_) {
      if (waiting_[number].next != kMatched) visit(waiting_[number]);
    }
  }

  int64_t next_row() const { return next_row_; }
  const Counts& counts() const { return counts_; }
  size_t known() const { return open_.size() + closed_.size(); }
  size_t open() const { return still_open_; }
  size_t waiting() const { return still_waiting_; }
  size_t bytes() const {
    return exposures_.bytes() + known_.bytes() + waiting_.bytes() + expected_.bytes() +
           sizeof(uint32_t) * (known() + waiting_order_.size());
  }

 private:
  static constexpr size_t kAhead = 12;  // how far ahead slots are prefetched

  // Returns whether `key` exceeds time + span, for any times and a span from 0 on.
  static bool IsPast(int64_t key, int64_t time, int64_t span) {
    return key > time &&
           static_cast<uint64_t>(key) - static_cast<uint64_t>(time) > static_cast<uint64_t>(span);
  }

  int64_t open_span() const { return settings_.within + settings_.lateness; }
  int64_t known_span() const { return open_span() + settings_.corrections; }

  bool Belongs(int64_t outcome, int64_t exposure) const {
    return outcome >= exposure &&
           static_cast<uint64_t>(outcome) - static_cast<uint64_t>(exposure) <
               static_cast<uint64_t>(settings_.within + settings_.corrections);
  }

  void Advance(int64_t key, Output* output) {
    while (!open_.empty() && IsPast(key, exposures_[open_.front()].time, open_span())) {
      Close(open_.Pop(), output);
    }
    while (!closed_.empty() && IsPast(key, exposures_[closed_.front()].time, known_span())) {
      Forget(closed_.Pop(), output);
    }
    while (!waiting_order_.empty() &&
           IsPast(key, waiting_[waiting_order_.front()].arrived, known_span())) {
      Expire();
    }
  }

  bool AddExposure(uint64_t fingerprint, int64_t key, int64_t time, int32_t part, Output* output) {
    ++counts_.exposures;
    if (known_.Find(fingerprint) != kNone) {
      ++counts_.repeated_exposures;
      return false;
    }
    if (IsPast(key, time, open_span())) ++counts_.late_exposures;
    const int64_t row = next_row_++;
    const uint32_t number = Insert({fingerprint, time, row, part, Status::kOpen});
    open_.Push(number);
    const uint32_t first = expected_.Find(fingerprint);
    if (first == kNone) return true;
    expected_.Remove(first);
    for (uint32_t at = first; at != kNone;) {
      Match(waiting_[at], number, output);
      --still_waiting_;
      at = std::exchange(waiting_[at].next, kMatched);
    }
    return true;
  }

  void AddOutcome(const Waiting& outcome, Output* output) {
    ++counts_.outcomes;
    const uint32_t number = known_.Find(outcome.fingerprint);
    if (number == kNone) {
      Wait(outcome);
    } else {
      Match(outcome, number, output);
    }
  }

  void Match(const Waiting& outcome, uint32_t number, Output* output) {
    Exposure& exposure = exposures_[number];
    if (!Belongs(outcome.time, exposure.time)) {
      ++counts_.unmatched_outcomes;
      return;
    }
    if (exposure.status == Status::kPositive) {
      ++counts_.repeated_outcomes;
      return;
    }
    if (exposure.status == Status::kOpen) {
      --still_open_;
    } else {
      ++counts_.corrections;
      if (exposure.status == Status::kNegative) output->Write(exposure.row, 0, -1);
    }
    output->Write(exposure.row, outcome.label, 1);
    output->released.push_back(exposure.row);
    exposure.status = Status::kPositive;
    ++counts_.positives;
  }

  void Close(uint32_t number, Output* output) {
    Exposure& exposure = exposures_[number];
    if (exposure.status == Status::kOpen) {
      --still_open_;
      if (KeepsNegative(exposure.fingerprint)) {
        output->Write(exposure.row, 0, 1);
        exposure.status = Status::kNegative;
        ++counts_.negatives;
      } else {
        exposure.status = Status::kThinned;
        ++counts_.thinned;
      }
    }
    if (settings_.corrections == 0) {
      Forget(number, output);
    } else {
      closed_.Push(number);
    }
  }

  void Forget(uint32_t number, Output* output) {
    const TimeQueue& queue = settings_.corrections == 0 ? open_ : closed_;
    if (const Exposure* later = queue.Ahead(kAhead)) known_.Prefetch(later->fingerprint);
    if (const Exposure* later = queue.Ahead(2 * kAhead)) gmeta::Prefetch(later);
    const Exposure& exposure = exposures_[number];
    if (exposure.status != Status::kPositive) output->released.push_back(exposure.row);
    known_.Remove(number);
    exposures_.Give(number);
  }

  // A function of the key alone: whoever has the exposure, and whenever, decides alike. Hashed once
  // more, because the fingerprint may choose the key's partition, too.
  bool KeepsNegative(uint64_t fingerprint) const {
    const uint64_t hash = AddWord(fingerprint, 0x6e656761746976ULL);  // "negativ"
    return static_cast<double>(hash >> 11) * 0x1p-53 < settings_.negatives;
  }

  uint32_t Insert(const Exposure& exposure) {
    const uint32_t number = exposures_.Take();
    exposures_[number] = exposure;
    known_.Insert(number);
    if (exposure.status == Status::kOpen) ++still_open_;
    return number;
  }

  void Wait(const Waiting& outcome) {
    const uint32_t number = waiting_.Take();
    waiting_[number] = outcome;
    waiting_order_.push_back(number);
    ++still_waiting_;
    const uint32_t first = expected_.Find(outcome.fingerprint);
    if (first == kNone) {
      expected_.Insert(number);
    } else {
      waiting_[waiting_[first].last].next = number;
    }
    waiting_[first == kNone ? number : first].last = number;
  }

  void Expire() {
    const uint32_t number = waiting_order_.front();
    waiting_order_.pop_front();
    const Waiting& outcome = waiting_[number];
    if (outcome.next != kMatched) {  // then it is its chain's first, which came before the others
      ++counts_.unmatched_outcomes;
      --still_waiting_;
      if (outcome.next == kNone) {
        expected_.Remove(number);
      } else {
        expected_.Replace(number, outcome.next);
        waiting_[outcome.next].last = outcome.last;
      }
    }
    waiting_.Give(number);
  }

  const Settings settings_;
  Counts counts_;
  int64_t next_row_ = 0;
  size_t still_open_ = 0;
  size_t still_waiting_ = 0;
  Items<Exposure> exposures_;
  FingerprintIndex<Exposure> known_{exposures_};
  TimeQueue open_{exposures_};
  TimeQueue closed_{exposures_};
  Items<Waiting> waiting_;
  FingerprintIndex<Waiting> expected_{waiting_};
  std::deque<uint32_t> waiting_order_;
};

}  // namespace gmeta::join

#endif  // GMETA_IO_JOIN_OPEN_EXPOSURES_H_
