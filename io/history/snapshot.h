// A user's history as of a moment.
//
// An event has a time, when it happened, and a birth: the generation of the store that first held
// it. The history at a moment (start, until, generation) is
//
//     the events with start <= time < until and birth <= generation, in the order of (time, birth),
//
// and of these the newest L. A later generation may hold more events, including some that happened
// before `until` and arrived late; their birth excludes them. So every later generation rebuilds
// the same history, as long as none of its events is deleted.
//
//   Order        Events of one time and one birth keep the order in which they were appended. They
//                lie in that order in their stripes, and stripes lie in the order in which they
//                were written (shard_index.h), so a stable sort by (time, birth) restores it
//                whatever was compacted. Usually nothing overlaps and nothing is sorted.
//   Few stripes  Whether all events of a stripe count follows from its times and births alone. Let
//                such stripes, the latest first, have L events, and T be the earliest time in them.
//                Then the newest L events have a time of at least T, and all stripes that end
//                before T are left unread. The others are read: they may overlap T because events
//                came late.
//   One read     Stripes that lie side by side in a file are read together. A user's stripes of a
//                group are written side by side, so a history is one read unless it was appended
//                to.
//   One decoding Decoded stripes of a user are kept until the next user's turn. So consecutive
//                requests of a user read and decode each stripe once.

#ifndef GMETA_IO_HISTORY_SNAPSHOT_H_
#define GMETA_IO_HISTORY_SNAPSHOT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/shard_index.h"
#include "io/history/stripe.h"

namespace gmeta::history {

// The first columns of every stripe of events.
enum EventColumn : size_t { kTime = 0, kBirth = 1, kFirstOwn = 2 };

struct Moment {
  int64_t start = INT64_MIN;  // the first time that counts
  int64_t until = INT64_MAX;  // the first time that doesn't
  int64_t generation = INT64_MAX;
};

// What a snapshot is read from.
class StripeSource {
 public:
  virtual ~StripeSource() = default;
  // Returns `bytes` bytes of a file from `offset` on, which stay valid until the next call; less if
  // the file ends there, or can't be read.
  virtual std::string_view Read(int64_t file, int64_t offset, size_t bytes) = 0;
};

// What went wrong, and in which stripe.
struct SnapshotFault {
  StripeFault fault = StripeFault::kNone;
  StripePlace place{};

  bool ok() const { return fault == StripeFault::kNone; }
};

// Chooses the stripes of a group that have the newest `longest` events of a moment.
//
// Args:
//   places: The user's stripes.
// Returns their numbers, ascending.
inline std::vector<size_t> ChooseStripes(const StripePlace* places, size_t count, int64_t group,
                                         const Moment& moment, size_t longest) {
  if (longest == 0) return {};
  std::vector<size_t> chosen;
  std::vector<const StripePlace*> whole;
  for (size_t i = 0; i < count; ++i) {
    const StripePlace& place = places[i];
    if (place.group != group || place.first >= moment.until || place.last < moment.start ||
        place.born_first > moment.generation) {
      continue;
    }
    chosen.push_back(i);
    if (place.first >= moment.start && place.last < moment.until &&
        place.born_last <= moment.generation) {
      whole.push_back(&place);
    }
  }
  std::sort(whole.begin(), whole.end(),
            [](const StripePlace* a, const StripePlace* b) { return a->first > b->first; });
  size_t events = 0;
  for (const StripePlace* place : whole) {
    events += static_cast<size_t>(place->events);
    if (events < longest) continue;
    const auto is_older = [&](size_t i) { return places[i].last < place->first; };
    chosen.erase(std::remove_if(chosen.begin(), chosen.end(), is_older), chosen.end());
    break;
  }
  return chosen;
}

// Rebuilds histories, one after another; its buffers serve all of them. Call Forget() before those
// of another user, group or other columns.
class Snapshot {
 public:
  // The most bytes between two stripes that are read and thrown away, to save a read.
  static constexpr int64_t kMaxGap = 4096;

  // Rebuilds the newest `longest` events of a user at a moment.
  //
  // Args:
  //   columns: The numbers of the stripes' columns to rebuild, in any order.
  //   out: For each of `columns` a vector, to whose end the events' values are added; after a fault
  //     it is unchanged.
  SnapshotFault Read(const StripePlace* places, size_t count, int64_t group, const Moment& moment,
                     size_t longest, const std::vector<size_t>& columns, StripeSource* source,
                     std::vector<std::vector<int64_t>>* out) {
    if (begins_.empty()) begins_.resize(count, kNotRead);
    values_.resize(columns.size());
    const std::vector<size_t> chosen = ChooseStripes(places, count, group, moment, longest);
    wanted_.clear();
    for (size_t number : chosen) {
      if (begins_[number] == kNotRead) wanted_.push_back(number);
    }
    for (size_t i = 0; i < wanted_.size();) {
      const SnapshotFault fault = ReadRun(places, columns, source, &i);
      if (fault.ok()) continue;
      Forget();
      return fault;
    }
    Keep(places, chosen, moment, longest);
    for (size_t c = 0; c < columns.size(); ++c) {
      std::vector<int64_t>& to = (*out)[c];
      const int64_t* const from = values_[c].data();
      if (kept_.empty()) {
        to.insert(to.end(), from + first_, from + first_ + count_);
        continue;
      }
      // Not reserve, which allocates no more than requested, and would copy all for each history.
      const size_t before = to.size();
      to.resize(before + count_);
      for (size_t i = 0; i < count_; ++i) to[before + i] = from[kept_[i]];
    }
    return {};
  }

  // Releases the stripes of the user whose histories were rebuilt.
  void Forget() {
    begins_.clear();
    times_.clear();
    births_.clear();
    for (std::vector<int64_t>& column : values_) column.clear();
  }

  // The number of events of the last history, unless it had a fault.
  size_t kept() const { return count_; }
  // The number of reads from the source, and of their bytes, since the snapshot was made.
  size_t reads() const { return reads_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kNotRead = SIZE_MAX;

  // Reads the stripes from wanted_[*i] on that lie side by side, and moves on after them.
  SnapshotFault ReadRun(const StripePlace* places, const std::vector<size_t>& columns,
                        StripeSource* source, size_t* i) {
    const StripePlace& first = places[wanted_[*i]];
    int64_t end = first.offset + first.bytes;
    size_t after = *i + 1;
    for (; after < wanted_.size(); ++after) {
      const StripePlace& next = places[wanted_[after]];
      if (next.file != first.file || next.offset < end || next.offset - end > kMaxGap) break;
      end = next.offset + next.bytes;
    }
    const auto size = static_cast<size_t>(end - first.offset);
    const std::string_view read = source->Read(first.file, first.offset, size);
    ++reads_;
    bytes_ += read.size();
    for (; *i < after; ++*i) {
      const StripePlace& place = places[wanted_[*i]];
      const auto at = static_cast<size_t>(place.offset - first.offset);
      if (at + static_cast<size_t>(place.bytes) > read.size()) {
        return {StripeFault::kTruncated, place};
      }
      begins_[wanted_[*i]] = times_.size();
      const StripeFault fault =
          Decode(read.substr(at, static_cast<size_t>(place.bytes)), place, columns);
      if (fault != StripeFault::kNone) return {fault, place};
    }
    return {};
  }

  StripeFault Decode(std::string_view bytes, const StripePlace& place,
                     const std::vector<size_t>& columns) {
    Stripe stripe;
    StripeFault fault = stripe.Open(bytes);
    if (fault != StripeFault::kNone) return fault;
    if (stripe.events() != static_cast<size_t>(place.events)) return StripeFault::kOther;
    const auto add = [&](size_t column, std::vector<int64_t>* to) {
      if (fault != StripeFault::kNone) return;
      if (column >= stripe.columns()) {
        fault = StripeFault::kBadColumn;
        return;
      }
      to->resize(to->size() + stripe.events());
      fault = stripe.Read(column, to->data() + to->size() - stripe.events());
    };
    add(kTime, &times_);
    add(kBirth, &births_);
    const bool is_meant = fault != StripeFault::kNone ||
                          (HasBounds(times_, place.events, place.first, place.last) &&
                           HasBounds(births_, place.events, place.born_first, place.born_last));
    if (!is_meant) return StripeFault::kOther;
    const auto events = static_cast<ptrdiff_t>(place.events);
    for (size_t c = 0; c < columns.size(); ++c) {
      if (columns[c] >= kFirstOwn) {
        add(columns[c], &values_[c]);
      } else {  // it is decoded already
        const std::vector<int64_t>& own = columns[c] == kTime ? times_ : births_;
        values_[c].insert(values_[c].end(), own.end() - events, own.end());
      }
    }
    return fault;
  }

  // Whether the last `count` values have these bounds. So a stripe of another file or generation,
  // which is sound by itself, isn't taken for the one that the index means.
  static bool HasBounds(const std::vector<int64_t>& values, int64_t count, int64_t first,
                        int64_t last) {
    const auto [low, high] =
        std::minmax_element(values.end() - static_cast<ptrdiff_t>(count), values.end());
    return *low == first && *high == last;
  }

  // Finds the events to be kept. Usually the chosen stripes lie one after another in memory,
  // their events are in order, and all before the moment were born by then: two binary searches
  // find the events side by side, and none is examined alone.
  void Keep(const StripePlace* places, const std::vector<size_t>& chosen, const Moment& moment,
            size_t longest) {
    kept_.clear();
    first_ = count_ = 0;
    if (chosen.empty() || KeepRun(places, chosen, moment, longest)) return;
    for (size_t number : chosen) {
      const size_t begin = begins_[number], end = begin + Events(places[number]);
      size_t kept = kept_.size();
      kept_.resize(kept + end - begin);
      for (size_t i = begin; i < end; ++i) {
        kept_[kept] = i;
        kept += static_cast<size_t>((times_[i] >= moment.start) & (times_[i] < moment.until) &
                                    (births_[i] <= moment.generation));
      }
      kept_.resize(kept);
    }
    const auto is_before = [this](size_t a, size_t b) { return IsBefore(a, b); };
    if (!std::is_sorted(kept_.begin(), kept_.end(), is_before)) {
      std::stable_sort(kept_.begin(), kept_.end(), is_before);
    }
    count_ = std::min(longest, kept_.size());
    kept_.erase(kept_.begin(), kept_.end() - static_cast<ptrdiff_t>(count_));
  }

  // Finds the events as first_ and count_ if they lie side by side; returns whether they do.
  bool KeepRun(const StripePlace* places, const std::vector<size_t>& chosen, const Moment& moment,
               size_t longest) {
    const size_t begin = begins_[chosen.front()];
    size_t end = begin;
    for (size_t number : chosen) {
      if (begins_[number] != end) return false;
      end += Events(places[number]);
    }
    size_t unordered = 0;
    for (size_t i = begin + 1; i < end; ++i) unordered += static_cast<size_t>(IsBefore(i, i - 1));
    if (unordered > 0) return false;
    const auto of = [this](size_t i) { return times_.begin() + static_cast<ptrdiff_t>(i); };
    const auto from = std::lower_bound(of(begin), of(end), moment.start);
    const auto to = std::lower_bound(from, of(end), moment.until);
    const auto births = births_.begin() + (from - times_.begin());
    size_t unborn = 0;
    for (ptrdiff_t i = 0; i < to - from; ++i) {
      unborn += static_cast<size_t>(births[i] > moment.generation);
    }
    if (unborn > 0) return false;
    count_ = std::min(longest, static_cast<size_t>(to - from));
    first_ = static_cast<size_t>(to - times_.begin()) - count_;
    return true;
  }

  static size_t Events(const StripePlace& place) { return static_cast<size_t>(place.events); }

  bool IsBefore(size_t a, size_t b) const {
    return (times_[a] < times_[b]) | ((times_[a] == times_[b]) & (births_[a] < births_[b]));
  }

  // The user's events that were read, and for each stripe the place of its first one.
  std::vector<int64_t> times_, births_;
  std::vector<std::vector<int64_t>> values_;
  std::vector<size_t> begins_;
  std::vector<size_t> wanted_;  // stripes that a history needs and that weren't read
  // Of the events that were read, those with these numbers are kept; if it is empty, those side by
  // side from first_ on.
  std::vector<size_t> kept_;
  size_t first_ = 0, count_ = 0;
  size_t reads_ = 0, bytes_ = 0;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_SNAPSHOT_H_
