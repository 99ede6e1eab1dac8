// An append-only file of events, from which a process that was killed restores its recent events.
//
//     0    bytes    a header of the caller's
//     ...  records  uint32 events; uint32 CRC-32C of the first word and of the events; the events,
//                   `words` of 64 bits each, little end first
//
//   Order       A record is one write at the end of the file, under the caller's lock, so records
//               have the order of their events' sequence numbers. The kernel has the bytes when
//               Append returns: they outlive the process, and after Sync the machine too.
//   Commit      Sync flushes whatever was written when it begins, for all callers that wait: one
//               flush serves many appends.
//   Torn tail   A write that fails is cut off again. If the machine stops, the last records may be
//               incomplete: Replay ends before the first record whose checksum differs, and
//               returns where, so that the caller can cut the file there.
//   Failure     If a flush fails, or what a failed write left can't be cut off, it is unknown what
//               the file holds: every later Append and Sync then fails with that error.
//
// Append needs exclusive access; Sync may run beside it and beside itself.

#ifndef GMETA_IO_HISTORY_EVENT_LOG_H_
#define GMETA_IO_HISTORY_EVENT_LOG_H_

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "io/history/file_source.h"
#include "ops/common/crc32c.h"

namespace gmeta::history {

struct RecordHead {
  uint32_t events;
  uint32_t crc;
};

inline uint32_t RecordCrc(uint32_t events, const char* bytes, size_t size) {
  return Crc32c(bytes, size, Crc32c(reinterpret_cast<const char*>(&events), sizeof(events)));
}

class EventLog {
 public:
  static constexpr size_t kMostEvents = size_t{1} << 20;  // of a record

  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // Opens a file that has a header, to write at its end; error() is the errno of a failure.
  EventLog(const char* path, size_t words)
      : event_bytes_(words * sizeof(int64_t)), descriptor_(open(path, O_RDWR | O_CLOEXEC)) {
    const off_t end = descriptor_ < 0 ? -1 : lseek(descriptor_, 0, SEEK_END);
    if (end < 0) {
      error_ = errno;
    } else {
      written_ = synced_ = static_cast<uint64_t>(end);
    }
  }

  ~EventLog() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int error() const { return error_; }
  uint64_t written() const { return written_; }

  // Writes a record. Returns 0, or the errno of a failure, after which the file is as before.
  int Append(const int64_t* rows, size_t events) {
    if (error_ != 0) return error_;
    const size_t size = events * event_bytes_;
    const auto count = static_cast<uint32_t>(events);
    const char* const bytes = reinterpret_cast<const char*>(rows);
    const RecordHead head = {count, RecordCrc(count, bytes, size)};
    record_.resize(sizeof(head) + size);
    std::memcpy(record_.data(), &head, sizeof(head));
    std::memcpy(record_.data() + sizeof(head), bytes, size);
    const uint64_t begin = written_;
    for (size_t done = 0; done < record_.size();) {
      const ssize_t wrote = pwrite(descriptor_, record_.data() + done, record_.size() - done,
                                   static_cast<off_t>(begin + done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) {
        const int failure = wrote < 0 ? errno : ENOSPC;
        if (ftruncate(descriptor_, static_cast<off_t>(begin)) != 0) error_ = failure;
        return failure;
      }
      done += static_cast<size_t>(wrote);
    }
    written_ = begin + record_.size();
    return 0;
  }

  // Flushes the bytes before `end` to the drive. Returns 0, or the errno of a failure.
  int Sync(uint64_t end) {
    const std::lock_guard<std::mutex> lock(sync_);
    if (error_ != 0) return error_;
    if (synced_ >= end) return 0;
    const uint64_t until = written_;
    if (fdatasync(descriptor_) != 0) {
      error_ = errno;
      return error_;
    }
    synced_ = until;
    return 0;
  }

 private:
  const size_t event_bytes_;
  const int descriptor_;
  std::atomic<int> error_{0};
  std::atomic<uint64_t> written_{0};
  std::mutex sync_;
  uint64_t synced_ = 0;  // guarded by sync_
  std::vector<char> record_;
};

// Reads the records of a log from `offset` on, and calls add(rows, events) for each sound one.
// Returns where they end: the size of the file, unless a record is incomplete or damaged; -1 if the
// file can't be opened.
template <class Add>
int64_t ReplayLog(const char* path, int64_t offset, size_t words, const Add& add) {
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return -1;
  std::vector<char> buffer;
  std::vector<int64_t> rows;
  for (RecordHead head{};;) {
    const std::string_view begin = ReadFile(descriptor, offset, sizeof(head), &buffer);
    if (begin.size() < sizeof(head)) break;
    std::memcpy(&head, begin.data(), sizeof(head));
    if (head.events == 0 || head.events > EventLog::kMostEvents) break;
    const size_t size = head.events * words * sizeof(int64_t);
    const std::string_view events =
        ReadFile(descriptor, offset + static_cast<int64_t>(sizeof(head)), size, &buffer);
    if (events.size() < size || RecordCrc(head.events, events.data(), size) != head.crc) break;
    rows.resize(head.events * words);
    std::memcpy(rows.data(), events.data(), size);
    add(rows.data(), size_t{head.events});
    offset += static_cast<int64_t>(sizeof(head) + size);
  }
  close(descriptor);
  return offset;
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_EVENT_LOG_H_
