// Histories as a ranker knows them now: the store's events, and the tail of recent ones.
//
// The history before `until` is the newest L of
//
//     the generation's events before `until`, in the order of (time, birth), and
//     the recent events before `until` that the generation lacks, in the order of their arrival,
//
// merged by time; at equal times the store's come first. The newest L of both together need only
// the newest L of the store, so no more is read. A history is returned with what an exposure has to
// log to rebuild it from any later generation: the generation's number, the recent events that are
// in the history, and the checksum of its columns (history_crc.h).

#ifndef GMETA_IO_HISTORY_RECENT_SNAPSHOT_H_
#define GMETA_IO_HISTORY_RECENT_SNAPSHOT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "io/history/history_crc.h"
#include "io/history/opened_generation.h"
#include "io/history/recent_events.h"
#include "io/history/snapshot.h"

namespace gmeta::history {

// A column that is read.
struct RecentColumn {
  size_t stripe;  // its number in the store's stripes
  size_t row;     // its number in the rows of recent events
  bool is_float;
};

// What snapshots have in common.
struct RecentPlan {
  int64_t group = 0;  // of the store's columns
  std::vector<RecentColumn> columns;
  size_t history = 0;  // the first so many columns are the history; the tail has all
  size_t time = 0;     // which of the columns is the time
};

// Takes snapshots; each thread has its own.
class RecentReader {
 public:
  // Takes the snapshot of a user, and adds it to the results.
  SnapshotFault Read(const RecentEvents& recent, const RecentPlan& plan, int64_t user,
                     int64_t start, int64_t until, size_t longest) {
    const size_t columns = plan.columns.size();
    values_.resize(columns);
    tail_.resize(columns);
    if (stripes_.size() != columns) {
      stripes_.clear();
      for (const RecentColumn& column : plan.columns) stripes_.push_back(column.stripe);
    }
    opened_ = recent.Tail(user, start, until, &rows_);
    const OpenedGeneration::Shard& shard = opened_->Of(user);
    source_.Choose(&shard);
    const auto [places, count] = shard.index.Find(user);
    stored_.resize(columns);
    for (std::vector<int64_t>& column : stored_) column.clear();
    snapshot_.Forget();
    const Moment moment{start, until, opened_->generation()};
    const SnapshotFault fault =
        snapshot_.Read(places, count, plan.group, moment, longest, stripes_, &source_, &stored_);
    if (!fault.ok()) return fault;
    Merge(recent.width(), plan, longest);
    uint32_t crc = 0;
    for (size_t c = 0; c < plan.history; ++c) {
      const size_t begin = static_cast<size_t>(splits_.back());
      crc = CrcOfValues(values_[c].data() + begin, values_[c].size() - begin, crc);
    }
    crcs_.push_back(static_cast<int64_t>(crc));
    generations_.push_back(opened_->generation());
    splits_.push_back(static_cast<int64_t>(values_[0].size()));
    tail_splits_.push_back(static_cast<int64_t>(tail_[0].size()));
    return fault;
  }

  // Removes all results; the buffers stay.
  void Clear() {
    splits_.assign(1, 0);
    tail_splits_.assign(1, 0);
    generations_.clear();
    crcs_.clear();
    for (std::vector<int64_t>& column : values_) column.clear();
    for (std::vector<int64_t>& column : tail_) column.clear();
  }

  // Returns the generation of the last Read.
  int64_t generation() const { return opened_->generation(); }
  size_t events() const { return static_cast<size_t>(splits_.back()); }
  size_t tail_events() const { return static_cast<size_t>(tail_splits_.back()); }

  // Copies the results, one after another: the splits of histories and of tails, generations,
  // checksums, the history's columns, and the tail's. A column of float32 is its numbers, padded to
  // whole words.
  void CopyTo(const RecentPlan& plan, int64_t* out) const {
    for (const std::vector<int64_t>* part : {&splits_, &tail_splits_, &generations_, &crcs_}) {
      out = std::copy(part->begin(), part->end(), out);
    }
    for (size_t c = 0; c < plan.history; ++c) out = Put(values_[c], plan.columns[c].is_float, out);
    for (size_t c = 0; c < tail_.size(); ++c) out = Put(tail_[c], plan.columns[c].is_float, out);
  }

 private:
  static int64_t* Put(const std::vector<int64_t>& values, bool is_float, int64_t* out) {
    if (!is_float) return std::copy(values.begin(), values.end(), out);
    char* to = reinterpret_cast<char*>(out);
    for (int64_t value : values) {
      const auto bits = static_cast<uint32_t>(value);
      std::memcpy(to, &bits, sizeof(bits));
      to += sizeof(bits);
    }
    return out + (values.size() + 1) / 2;
  }

  // Adds the newest `longest` of the store's events and the tail to the results.
  void Merge(size_t width, const RecentPlan& plan, size_t longest) {
    const size_t stored = stored_[0].size(), recent = rows_.size() / width;
    const int64_t* const times = stored_[plan.time].data();
    const auto tail_time = [&](size_t k) { return rows_[k * width + RecentEvents::kTime]; };
    // From the newest event backwards: whether each is of the tail.
    const size_t total = std::min(longest, stored + recent);
    size_t i = stored, j = recent;
    is_tail_.resize(total);
    for (size_t k = total; k-- > 0;) {
      is_tail_[k] = j > 0 && (i == 0 || tail_time(j - 1) >= times[i - 1]);
      --(is_tail_[k] != 0 ? j : i);
    }
    for (size_t c = 0; c < plan.columns.size(); ++c) {
      for (size_t k = j; k < recent; ++k) {
        tail_[c].push_back(rows_[k * width + plan.columns[c].row]);
      }
      std::vector<int64_t>& to = values_[c];
      const size_t before = to.size();
      to.resize(before + total);
      const int64_t* store = stored_[c].data() + i;
      if (j == recent) {  // no event of the tail counts
        std::copy(store, store + total, to.begin() + static_cast<ptrdiff_t>(before));
        continue;
      }
      const int64_t* tail = rows_.data() + j * width + plan.columns[c].row;
      for (size_t k = 0; k < total; ++k) {
        to[before + k] = is_tail_[k] != 0 ? *tail : *store++;
        if (is_tail_[k] != 0) tail += width;
      }
    }
  }

  std::shared_ptr<const OpenedGeneration> opened_;
  GenerationSource source_;
  Snapshot snapshot_;
  std::vector<size_t> stripes_;
  std::vector<int64_t> rows_;                 // of the tail
  std::vector<std::vector<int64_t>> stored_;  // the store's events, by column
  std::vector<char> is_tail_;
  std::vector<int64_t> splits_{0}, tail_splits_{0}, generations_, crcs_;
  std::vector<std::vector<int64_t>> values_, tail_;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_RECENT_SNAPSHOT_H_
