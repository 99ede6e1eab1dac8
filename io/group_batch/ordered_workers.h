// Work in parallel, results in order, and no more of them than asked for.
//
// A worker claims the next number k, makes item k, and puts it in slot k mod S; the consumer takes
// item 0, 1, 2, ... from the slots. A number is claimed only while it is less than S beyond what
// the consumer has taken, so slots never collide and at most S items exist:
//
//     taken ──► next_taken_ ........ items made or in the making ........ next_claimed_ ──► later
//                 └──────────────────────── at most S ──────────────────────────┘
//
// One mutex guards the numbers and the slots; what takes time, making an item, happens outside of
// it. A worker that makes nothing of its number ends the sequence there: what it was given to make
// lies behind the end. Cancel() wakes everybody; Next() then says so, and the destructor waits for
// the items that are in the making.

#ifndef GMETA_IO_GROUP_BATCH_ORDERED_WORKERS_H_
#define GMETA_IO_GROUP_BATCH_ORDERED_WORKERS_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace gmeta::group_batch {

template <typename Item>
class OrderedWorkers {
 public:
  // Makes item `number`, on thread `worker` of 0 to threads - 1; none if there is no such item.
  using Make = std::function<std::optional<Item>(int64_t number, size_t worker)>;

  OrderedWorkers(size_t threads, size_t slots, Make make) : make_(std::move(make)), slots_(slots) {
    for (size_t i = 0; i < threads; ++i) {
      threads_.emplace_back([this, i] { Work(i); });
    }
  }

  ~OrderedWorkers() {
    Cancel();
    for (std::thread& thread : threads_) thread.join();
  }

  // The next item; none behind the last one, or if it was cancelled. One consumer at a time.
  std::optional<Item> Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    Slot& slot = slots_[static_cast<size_t>(next_taken_) % slots_.size()];
    made_.wait(lock, [&] { return cancelled_ || slot.done; });
    if (!slot.done || !slot.item.has_value()) return std::nullopt;
    std::optional<Item> item = std::move(slot.item);
    slot = Slot();
    ++next_taken_;
    taken_.notify_one();
    return item;
  }

  void Cancel() {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    made_.notify_all();
    taken_.notify_all();
  }

 private:
  struct Slot {
    bool done = false;
    std::optional<Item> item;
  };

  void Work(size_t worker) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      taken_.wait(lock, [this] {
        return cancelled_ || ended_ ||
               next_claimed_ - next_taken_ < static_cast<int64_t>(slots_.size());
      });
      if (cancelled_ || ended_) return;
      const int64_t number = next_claimed_++;
      lock.unlock();
      std::optional<Item> item = make_(number, worker);
      lock.lock();
      if (!item.has_value()) {
        ended_ = true;
        taken_.notify_all();
      }
      Slot& slot = slots_[static_cast<size_t>(number) % slots_.size()];
      slot.item = std::move(item);
      slot.done = true;
      if (number == next_taken_) made_.notify_one();
    }
  }

  const Make make_;
  std::mutex mutex_;
  std::condition_variable made_;
  std::condition_variable taken_;
  std::vector<Slot> slots_;
  int64_t next_claimed_ = 0;
  int64_t next_taken_ = 0;
  bool ended_ = false;
  bool cancelled_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_ORDERED_WORKERS_H_
