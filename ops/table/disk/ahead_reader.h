// AheadReader: a thread that reads records before they are needed.
//
// It reads a request in pieces, and holds the records' mutex for one piece at a time, so that a
// writer of records needn't wait for long. A record that is written again later has another
// version: the copy that was read is then out of date.

#ifndef GMETA_OPS_TABLE_DISK_AHEAD_READER_H_
#define GMETA_OPS_TABLE_DISK_AHEAD_READER_H_

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "ops/table/disk/numbered_records.h"

namespace gmeta::disk {

class AheadReader {
 public:
  struct Request {
    std::vector<NumberedRecords::Wish> wishes;
    std::vector<uint32_t> versions;  // of the records that were read: the first wishes
    bool done = false;               // guarded by the reader's mutex
  };

  // `mutex` guards the records.
  AheadReader(NumberedRecords* records, std::mutex* mutex)
      : records_(records), records_mutex_(mutex), thread_([this] { Run(); }) {}
  ~AheadReader() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  AheadReader(const AheadReader&) = delete;
  AheadReader& operator=(const AheadReader&) = delete;

  // Any thread may call it. The request must stay in place until it is done.
  void Ask(Request* request) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      request->versions.clear();
      request->done = false;
      queue_.push_back(request);
    }
    changed_.notify_all();
  }
  bool IsDone(const Request& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return request.done;
  }
  void Await(const Request& request) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return request.done; });
  }

 private:
  static constexpr size_t kPiece = 4096;  // records

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stops_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Request* const request = queue_.front();
      queue_.pop_front();
      lock.unlock();
      Read(request);
      lock.lock();
      request->done = true;
      changed_.notify_all();
    }
  }

  // Records that were released meanwhile, and a drive that fails, end a request early: whoever
  // needs the records reads them again, and gets the error.
  void Read(Request* request) {
    std::vector<NumberedRecords::Wish> piece;
    for (size_t first = 0; first < request->wishes.size(); first += kPiece) {
      const size_t last = std::min(request->wishes.size(), first + kPiece);
      piece.assign(request->wishes.begin() + first, request->wishes.begin() + last);
      const std::lock_guard<std::mutex> lock(*records_mutex_);
      for (const NumberedRecords::Wish& wish : piece) {
        if (!records_->Has(wish.number)) return;
      }
      try {
        records_->Read(piece);
      } catch (const DiskError&) {
        return;
      }
      for (const NumberedRecords::Wish& wish : piece) {
        request->versions.push_back(records_->version(wish.number));
      }
    }
  }

  NumberedRecords* const records_;
  std::mutex* const records_mutex_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request*> queue_;
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace gmeta::disk

#endif  // GMETA_OPS_TABLE_DISK_AHEAD_READER_H_
