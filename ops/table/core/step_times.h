// When a table took its steps, by a clock: finds the rows that have not been used for some time,
// although a record has only the step of its last use.
//
// Layout
//   Pairs (step, time), ascending in both: at `time`, the table came to `step`. So a row whose last
//   step is below `step` was last used before `time`. The last pair is that of the last update.
//   Times are microseconds of any clock.
//
// Invariants
//   No row counts as unused for longer than it is. One counts as used more recently than it was by
//   at most a 64th of the lifetime and the time between two updates: pairs closer than that are
//   joined. Older pairs than the first that is needed are dropped, so at most 67 remain, whatever
//   the number of steps.
//
// Operations
//   Note    adds an update. A step that is not above the last one follows a rollback of the table:
//           pairs of later steps are dropped. A clock that went back counts as one that stood
//           still: the pairs move back with it, so that the durations between them remain.
//   Before  the step below which rows have expired.
//   Turns   which of 64 turns came between the last two updates: each comes once in `every`, and a
//           shard is swept in its turn, so that the sweeps of shards are spread evenly over time.
//           After a pause of `every` or longer, all turns have come.

#ifndef GMETA_OPS_TABLE_CORE_STEP_TIMES_H_
#define GMETA_OPS_TABLE_CORE_STEP_TIMES_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/table/core/sweep_schedule.h"

namespace gmeta {

struct StepTime {
  int64_t step;
  int64_t time;
};

class StepTimes {
 public:
  explicit StepTimes(std::vector<StepTime> pairs) : pairs_(std::move(pairs)) {}

  const std::vector<StepTime>& pairs() const { return pairs_; }

  // Notes that the table came to `step` at `time`. Returns a bit per turn that has come since the
  // note before: none at the first.
  uint64_t Note(int64_t step, int64_t time, int64_t lifetime, int64_t every) {
    while (!pairs_.empty() && pairs_.back().step > step) pairs_.pop_back();
    if (pairs_.empty()) {
      pairs_.push_back({step, time});
      return 0;
    }
    const int64_t back = pairs_.back().time - time;
    if (back > 0) {
      for (StepTime& pair : pairs_) pair.time -= back;
    }
    const uint64_t turns = Turns(pairs_.back().time, time, every);
    if (pairs_.back().step < step) {
      const size_t n = pairs_.size();
      if (n >= 2 && pairs_[n - 1].time - pairs_[n - 2].time < lifetime / kPairs) pairs_.pop_back();
      pairs_.push_back({step, time});
    }
    size_t old = 0;
    while (old + 1 < pairs_.size() && pairs_[old + 1].time <= time - lifetime) ++old;
    pairs_.erase(pairs_.begin(), pairs_.begin() + static_cast<std::ptrdiff_t>(old));
    return turns;
  }

  // Returns the step such that rows with a lower last step were last used before
  // `time - lifetime`; 0: there is none.
  int64_t Before(int64_t time, int64_t lifetime) const {
    int64_t step = 0;
    for (const StepTime& pair : pairs_) {
      if (pair.time <= time - lifetime) step = pair.step;
    }
    return step;
  }

  // Returns a bit per turn in (from, to].
  static uint64_t Turns(int64_t from, int64_t to, int64_t every) {
    if (to - from >= every) return ~uint64_t{0};
    const int64_t first = Turn(from, every) + 1;
    const int64_t last = Turn(to, every);
    uint64_t turns = 0;
    for (int64_t turn = first; turn <= last; ++turn) {
      turns |= uint64_t{1} << (static_cast<uint64_t>(turn) % kTurns);
    }
    return turns;
  }

 private:
  static constexpr int64_t kPairs = 64;  // in a lifetime

  // The number of the turn at a time: kTurns in `every`, which is at most 1e16.
  static int64_t Turn(int64_t time, int64_t every) {
    int64_t rounds = time / every;
    int64_t rest = time % every;
    if (rest < 0) --rounds, rest += every;
    return rounds * kTurns + rest * kTurns / every;
  }

  std::vector<StepTime> pairs_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_STEP_TIMES_H_
