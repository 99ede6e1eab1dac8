// Parallel work with results in order, and a bounded number of them in memory.
//
// A worker claims the next number k, makes item k, and puts it in slot k mod S. The consumer takes
// item 0, 1, 2, ... from the slots. A number is claimed only while it is less than S ahead of the
// items that the consumer has taken, so slots never collide and at most S items exist:
//
//     taken ──► next_taken_ ........ items made or in the making ........ next_claimed_ ──► later
//                 └──────────────────────── at most S ──────────────────────────┘
//
// One mutex guards the numbers and the slots. The slow part, making an item, happens outside of it.
// If a worker returns no item for its number, the sequence ends there. Cancel() wakes all threads;
// Next() then returns no item, and the destructor waits for the items being made.

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
  // Makes item `number` on thread `worker`, which is 0 to threads - 1. Returns none if there is no
  // such item.
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

  // Returns the next item; none after the last one, or after Cancel(). One consumer at a time.
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
