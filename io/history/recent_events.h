// The events of users that a store of histories doesn't have yet: its mutable tier.
//
// A ranker appends events as they happen, and reads histories of the store's newest generation
// together with these events, the tail. Now and then a segment of events is written into a file,
// which an append adds to the store; the generation that has them replaces them here.
//
//   Sequence     Each event gets the next sequence number, under one short lock, in which the event
//                is written to the log (event_log.h) if there is one. A segment is a range of
//                sequence numbers: Seal ends one, and begins the next with another log.
//   Partitions   Users are divided by hash into partitions. A partition has a lock, its users'
//                events in the order in which they came, and a view: the generation that its
//                snapshots read, with the sequence numbers that this generation contains. An append
//                copies one row under the lock and reads nothing of the history (a blind append).
//                A snapshot copies the tail under the lock; the store, whose files never change, is
//                read after it.
//   Consistency  Since tail and generation are read under one lock, each event is in exactly one of
//                both: Switch replaces the view of a partition under its lock. Until then, its
//                snapshots have the earlier generation and the events that this one lacks; from
//                then on, the later generation, without them. Partitions switch one after another:
//                a snapshot belongs to one user, and reports its own generation.
//   Removal      Events that the view contains are ignored at once, and removed later, a few users
//                for each turn of the lock. An append that is slower than the seal, the store and
//                the switch together finds its event contained, and drops it.
//   Export       Seal waits for the appends of the ended segment to finish. Appends of the next one
//                don't wait; two counters, of even and odd segments, distinguish them.
//   Order        A tail is ordered by (time, sequence). So a log restores the tails as they were,
//                although two appends to a user may take the partition's lock in either order.
//
// An event is a row of words: its sequence number, its time, and its columns. A user's rows are one
// array that grows by half. Thread safety: all methods may run concurrently, except that one thread
// at a time may call Seal, Switch and Export.

#ifndef GMETA_IO_HISTORY_RECENT_EVENTS_H_
#define GMETA_IO_HISTORY_RECENT_EVENTS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/history/event_log.h"
#include "io/history/opened_generation.h"
#include "ops/common/splitmix.h"

namespace gmeta::history {

// Sequence numbers from `begin` to `end` - 1.
struct SequenceRange {
  int64_t begin, end;
};

// A generation, and the sequence numbers of the events that it contains, as disjoint ranges.
struct RecentView {
  std::shared_ptr<const OpenedGeneration> opened;
  std::vector<SequenceRange> contained;  // ascending; few

  bool Contains(int64_t sequence) const {
    for (const SequenceRange& range : contained) {
      if (sequence < range.begin) return false;
      if (sequence < range.end) return true;
    }
    return false;
  }
};

class RecentEvents {
 public:
  enum Column : size_t { kSequence = 0, kTime = 1 };
  static constexpr int kFull = -2;  // beside 0 and the errno of a log
  // Bytes of a user beside the rows: the node, its bucket, and what the allocator adds.
  static constexpr size_t kUserBytes = 96;

  // Args:
  //   words: The words of an event without its sequence number: the time and the columns.
  //   memory: Events are refused while the arrays and the users take as many bytes.
  RecentEvents(size_t words, size_t memory)
      : width_(words + 1), memory_(memory), partitions_(new Partition[kPartitions]) {}

  size_t width() const { return width_; }
  int64_t events() const { return events_; }
  int64_t bytes() const { return bytes_; }

  // Adds events; `rows` has for each its user, its time and its columns. Returns 0, kFull, or the
  // errno of the log; after kFull, or a failed write, none of them is added.
  int Append(const int64_t* rows, size_t count) {
    if (static_cast<size_t>(bytes_) >= memory_) return kFull;
    std::shared_ptr<EventLog> log;
    uint64_t written = 0;
    int64_t sequence = 0, segment = 0;
    {
      const std::lock_guard<std::mutex> lock(order_);
      if (log_ != nullptr) {
        const int failure = log_->Append(rows, count);
        if (failure != 0) return failure;
        if (syncs_) log = log_;
        written = log_->written();
      }
      sequence = next_;
      next_ += static_cast<int64_t>(count);
      segment = segment_;
      ++in_flight_[static_cast<size_t>(segment & 1)];
    }
    const Landing landing{&in_flight_[static_cast<size_t>(segment & 1)]};  // also without memory
    const int failure = log == nullptr ? 0 : log->Sync(written);
    if (failure == 0) Insert(rows, count, sequence);
    return failure;
  }

  // Ends the segment; later events are written to `log`, if it isn't null, and flushed before
  // Append returns if `syncs`. Returns the ended segment, whose events are all in memory, and
  // flushed to its log; *failure is the errno of the flush.
  SequenceRange Seal(std::shared_ptr<EventLog> log, bool syncs, int* failure) {
    SequenceRange ended{};
    std::shared_ptr<EventLog> before;
    size_t parity = 0;
    {
      const std::lock_guard<std::mutex> lock(order_);
      ended = {begin_, next_};
      begin_ = next_;
      parity = static_cast<size_t>(segment_ & 1);
      ++segment_;
      before = std::exchange(log_, std::move(log));
      syncs_ = syncs;
    }
    while (in_flight_[parity] != 0) std::this_thread::yield();
    *failure = before == nullptr ? 0 : before->Sync(before->written());
    return ended;
  }

  // Flushes the log to the drive. Returns 0, or the errno of a failure.
  int Sync() {
    std::shared_ptr<EventLog> log;
    {
      const std::lock_guard<std::mutex> lock(order_);
      log = log_;
    }
    return log == nullptr ? 0 : log->Sync(log->written());
  }

  // Copies the events of a sealed segment into `out`, in the order of their sequence numbers: a row
  // for each, with its user in place of the number. Returns how many there are: those whose append
  // failed have a number, but aren't in memory.
  size_t Export(const SequenceRange& range, int64_t* out) const {
    std::vector<char> is_there(static_cast<size_t>(range.end - range.begin), 0);
    for (size_t i = 0; i < kPartitions; ++i) {
      const std::lock_guard<std::mutex> lock(partitions_[i].mutex);
      for (const auto& [user, rows] : partitions_[i].users) {
        for (size_t k = 0; k < rows.count; ++k) {
          const int64_t* const row = rows.at(k, width_);
          if (row[kSequence] < range.begin || row[kSequence] >= range.end) continue;
          const auto place = static_cast<size_t>(row[kSequence] - range.begin);
          std::memcpy(out + place * width_, row, width_ * sizeof(int64_t));
          out[place * width_ + kSequence] = user;
          is_there[place] = 1;
        }
      }
    }
    size_t found = 0;
    for (size_t place = 0; place < is_there.size(); ++place) {
      if (is_there[place] == 0) continue;
      if (found < place) {
        std::memcpy(out + found * width_, out + place * width_, width_ * sizeof(int64_t));
      }
      ++found;
    }
    return found;
  }

  // Makes snapshots read another generation, and removes the events that it contains.
  void Switch(const RecentView& view) {
    for (size_t i = 0; i < kPartitions; ++i) {
      const std::lock_guard<std::mutex> lock(partitions_[i].mutex);
      partitions_[i].view = view;
    }
    for (size_t i = 0; i < kPartitions; ++i) Sweep(&partitions_[i]);
  }

  // Copies a user's events with start <= time < until that the generation lacks into `rows`,
  // ordered by (time, sequence), and returns the generation.
  std::shared_ptr<const OpenedGeneration> Tail(int64_t user, int64_t start, int64_t until,
                                               std::vector<int64_t>* rows) const {
    rows->clear();
    std::shared_ptr<const OpenedGeneration> opened;
    {
      const Partition& partition = Of(user);
      const std::lock_guard<std::mutex> lock(partition.mutex);
      opened = partition.view.opened;
      const auto found = partition.users.find(user);
      if (found == partition.users.end()) return opened;
      for (size_t k = 0; k < found->second.count; ++k) {
        const int64_t* const row = found->second.at(k, width_);
        if (row[kTime] < start || row[kTime] >= until) continue;
        if (partition.view.Contains(row[kSequence])) continue;
        rows->insert(rows->end(), row, row + width_);
      }
    }
    Sort(rows);
    return opened;
  }

 private:
  static constexpr size_t kPartitions = 1024;
  static constexpr size_t kSwept = 64;  // users for each turn of a lock

  // A user's events.
  struct Rows {
    std::unique_ptr<int64_t[]> words;
    size_t count = 0, capacity = 0;  // in rows

    const int64_t* at(size_t row, size_t width) const { return words.get() + row * width; }
  };

  // Ends the flight of an append.
  struct Landing {
    std::atomic<int64_t>* in_flight;

    ~Landing() { --*in_flight; }
  };

  struct alignas(64) Partition {
    mutable std::mutex mutex;
    RecentView view;
    std::unordered_map<int64_t, Rows> users;
  };

  const Partition& Of(int64_t user) const {
    return partitions_[SplitMix64(static_cast<uint64_t>(user)) % kPartitions];
  }
  Partition& Of(int64_t user) {
    return partitions_[SplitMix64(static_cast<uint64_t>(user)) % kPartitions];
  }

  void Insert(const int64_t* rows, size_t count, int64_t sequence) {
    for (size_t i = 0; i < count; ++i, rows += width_, ++sequence) {
      Partition& partition = Of(rows[0]);
      const std::lock_guard<std::mutex> lock(partition.mutex);
      if (partition.view.Contains(sequence)) continue;
      const auto [at, is_new] = partition.users.try_emplace(rows[0]);
      Rows& own = at->second;
      if (is_new) bytes_ += kUserBytes;
      if (own.count == own.capacity) {
        Resize(std::max<size_t>(2, own.count + (own.count + 1) / 2), &own);
      }
      int64_t* const to = own.words.get() + own.count++ * width_;
      std::memcpy(to, rows, width_ * sizeof(int64_t));
      to[kSequence] = sequence;
      ++events_;
    }
  }

  void Resize(size_t capacity, Rows* rows) {
    std::unique_ptr<int64_t[]> words(new int64_t[capacity * width_]);
    if (rows->count > 0) {
      std::memcpy(words.get(), rows->words.get(), rows->count * width_ * sizeof(int64_t));
    }
    bytes_ += (static_cast<int64_t>(capacity) - static_cast<int64_t>(rows->capacity)) *
              static_cast<int64_t>(width_ * sizeof(int64_t));
    rows->words = std::move(words);
    rows->capacity = capacity;
  }

  // Removes what a partition's view contains.
  void Sweep(Partition* partition) {
    std::vector<int64_t> users;
    {
      const std::lock_guard<std::mutex> lock(partition->mutex);
      users.reserve(partition->users.size());
      for (const auto& each : partition->users) users.push_back(each.first);
    }
    for (size_t i = 0; i < users.size(); i += kSwept) {
      const std::lock_guard<std::mutex> lock(partition->mutex);
      for (size_t k = i; k < std::min(users.size(), i + kSwept); ++k) {
        const auto at = partition->users.find(users[k]);
        if (Keep(partition->view, &at->second)) continue;
        partition->users.erase(at);
        bytes_ -= kUserBytes;
      }
    }
  }

  // Removes what a view contains from a user's events; returns whether any is left.
  bool Keep(const RecentView& view, Rows* rows) {
    size_t kept = 0;
    for (size_t k = 0; k < rows->count; ++k) {
      int64_t* const row = rows->words.get() + k * width_;
      if (view.Contains(row[kSequence])) continue;
      if (kept < k) {
        std::memcpy(rows->words.get() + kept * width_, row, width_ * sizeof(int64_t));
      }
      ++kept;
    }
    events_ -= static_cast<int64_t>(rows->count - kept);
    rows->count = kept;
    if (kept * 4 < rows->capacity) Resize(kept, rows);
    return kept > 0;
  }

  // Orders rows by (time, sequence). Usually they are; otherwise their numbers are sorted, and each
  // row is then moved once.
  void Sort(std::vector<int64_t>* rows) const {
    const size_t count = rows->size() / width_;
    const auto is_before = [&](size_t a, size_t b) {
      const int64_t* const x = rows->data() + a * width_;
      const int64_t* const y = rows->data() + b * width_;
      return x[kTime] != y[kTime] ? x[kTime] < y[kTime] : x[kSequence] < y[kSequence];
    };
    size_t i = 1;
    while (i < count && !is_before(i, i - 1)) ++i;
    if (i >= count) return;
    std::vector<size_t> order(count);
    for (size_t k = 0; k < count; ++k) order[k] = k;
    std::sort(order.begin(), order.end(), is_before);
    std::vector<int64_t> sorted(rows->size());
    for (size_t k = 0; k < count; ++k) {
      std::memcpy(sorted.data() + k * width_, rows->data() + order[k] * width_,
                  width_ * sizeof(int64_t));
    }
    rows->swap(sorted);
  }

  const size_t width_;
  const size_t memory_;
  const std::unique_ptr<Partition[]> partitions_;
  std::atomic<int64_t> events_{0}, bytes_{0};
  std::array<std::atomic<int64_t>, 2> in_flight_{};  // appends of even and odd segments

  std::mutex order_;  // guards what follows
  int64_t next_ = 0, begin_ = 0, segment_ = 0;
  std::shared_ptr<EventLog> log_;
  bool syncs_ = false;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_RECENT_EVENTS_H_
