// Whether a collective must be aborted, and since when. Any thread may abort it, which wakes
// the thread that sleeps in poll() for sockets.

#ifndef GMETA_OPS_LANE_ABORT_H_
#define GMETA_OPS_LANE_ABORT_H_

#include <sys/eventfd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "ops/lane/socket.h"

namespace gmeta::lane {

class Abort {
 public:
  Abort() : wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

  // Permanently, and at once.
  void Now(const std::string& why) { Set(why, Clock::time_point(), true); }

  // After `grace`, unless it is withdrawn before.
  void Soon(const std::string& why, milliseconds grace) { Set(why, Clock::now() + grace, false); }
  void Withdraw() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_final_) at_ = Clock::time_point::max();
  }

  // Why it must be aborted now, or "".
  std::string Because() {
    if (at_.load() > Clock::now()) return "";
    std::lock_guard<std::mutex> lock(mutex_);
    return why_;
  }

  // When it must be aborted, and a descriptor that is readable when that changes.
  Clock::time_point at() const { return at_; }
  int fd() const { return wake_.fd(); }

  void Reset() {
    uint64_t woken;
    [[maybe_unused]] const ssize_t got = read(wake_.fd(), &woken, sizeof woken);
  }

 private:
  void Set(const std::string& why, Clock::time_point at, bool is_final) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_final_) return;
      is_final_ = is_final;
      why_ = why.empty() ? "aborted" : why;
      at_ = at;
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.fd(), &one, sizeof one);
  }

  Socket wake_;
  std::mutex mutex_;
  std::string why_;        // under mutex_, as is is_final_
  bool is_final_ = false;  // it stays aborted
  std::atomic<Clock::time_point> at_{Clock::time_point::max()};
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_ABORT_H_
