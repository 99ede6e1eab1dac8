// A lane as the ops hold it: its listener, then its channel, and the thread that runs the channel's
// collectives one after another, in the order in which they were handed in. So no thread of the
// caller's pool waits for other ranks.

#ifndef GMETA_OPS_LANE_LANE_H_
#define GMETA_OPS_LANE_LANE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/lane/channel.h"
#include "ops/lane/mesh.h"

namespace gmeta::lane {

// Collectives of one kind: begun, ended in whatever way, ended well, and the bytes of the last.
struct Counts {
  std::atomic<int64_t> begun{0}, ended{0}, calls{0}, bytes{0};

  void End(bool well, int64_t size) {
    if (well) {
      calls += 1;
      bytes += size;
    }
    ended += 1;
  }
};

class Lane {
 public:
  Counts alltoalls, allreduces;

  Lane() : queue_(std::make_shared<Queue>()) {
    thread_ = std::thread([queue = queue_] { queue->Run(); });
  }

  // Ends the thread, which first fails what was handed in. The last owner may be a job of the
  // thread itself, which then ends by itself.
  ~Lane() {
    if (channel_) channel_->Abort("the lane is closed");
    queue_->Push(nullptr);
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  std::string Listen(Address* address) { return lane::Listen(address, &listener_); }

  std::string Connect(int rank, const std::vector<Address>& addresses, const std::string& token,
                      milliseconds start, milliseconds patience) {
    if (!listener_) return "it doesn't listen, or was connected before";
    Mesh mesh;
    std::string why = mesh.Make(listener_, rank, addresses, token, start);
    listener_ = Socket();
    if (why.empty()) channel_ = std::make_unique<Channel>(mesh.Take(), rank, patience);
    return why;
  }

  // Null until it is connected.
  Channel* channel() const { return channel_.get(); }

  void Run(std::function<void()> job) { queue_->Push(std::move(job)); }

 private:
  struct Queue {
    void Push(std::function<void()> job) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(std::move(job));
      }
      come.notify_one();
    }

    void Run() {
      while (true) {
        std::unique_lock<std::mutex> lock(mutex);
        come.wait(lock, [this] { return !jobs.empty(); });
        const std::function<void()> job = std::move(jobs.front());
        jobs.pop_front();
        lock.unlock();
        if (!job) return;
        job();
      }
    }

    std::mutex mutex;
    std::condition_variable come;
    std::deque<std::function<void()>> jobs;
  };

  Socket listener_;
  std::unique_ptr<Channel> channel_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_LANE_H_
