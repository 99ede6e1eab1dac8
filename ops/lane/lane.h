// A lane as the ops hold it: its listener, then its channel, and a thread of its own.
//
// Collectives run one after another, in the order in which they were submitted. If the lane is
// free, the caller's thread begins a collective, and ends it too unless other ranks keep it waiting
// for more than a moment: an exchange between ranks that are in step costs no change of threads.
// Otherwise the lane's thread continues it, so no thread of the caller's pool waits for other
// ranks.

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

  ~Lane() { Close(); }

  // Ends the thread, which first fails what was submitted. The last owner may be a job of the
  // thread itself, which then ends by itself.
  void Close() {
    if (!thread_.joinable()) return;
    if (channel_) channel_->abort().Now("the lane is closed");
    queue_->Push({});
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  std::string Listen(Address* address) { return lane::Listen(address, &listener_); }

  // The last argument is the id of a communicator, which TCP doesn't have.
  std::string Connect(int rank, const std::vector<Address>& addresses, const std::string& key,
                      milliseconds start, milliseconds patience, const std::string&) {
    if (!listener_) return "it doesn't listen, or was connected before";
    Mesh mesh;
    std::string why = mesh.Make(listener_, rank, addresses, key, start);
    listener_ = Socket();
    if (why.empty()) channel_ = std::make_unique<Channel>(mesh.Take(), rank, patience);
    return why;
  }

  // Null until it is connected.
  Channel* channel() const { return channel_.get(); }

  bool is_open() const { return channel_ != nullptr; }
  int rank() const { return channel_->rank(); }
  int size() const { return channel_->size(); }
  bool Advance(bool may_sleep) { return channel_->Advance(may_sleep); }
  const std::string& failure() const { return channel_->failure(); }
  Abort& abort() { return channel_->abort(); }

  // A collective: what begins it; what continues it, as Channel::Advance does; what takes its
  // results; and what follows, such as the next collective.
  struct Job {
    std::function<void()> begin;
    std::function<bool(bool may_sleep)> advance;
    std::function<void()> take, after;
    bool has_begun = false;
  };

  void Run(Job job) {
    if (!queue_->Own()) return queue_->Push(std::move(job));
    job.begin();
    job.has_begun = true;
    if (!job.advance(false)) return queue_->HandOver(std::move(job));
    job.take();
    queue_->Disown();
    job.after();
  }

 private:
  // The thread that is in a collective owns the channel: a caller's or the lane's.
  struct Queue {
    // Whether the caller's thread has become the owner.
    bool Own() {
      std::lock_guard<std::mutex> lock(mutex);
      if (owned || !jobs.empty()) return false;
      return owned = true;
    }

    void Disown() {
      {
        std::lock_guard<std::mutex> lock(mutex);
        owned = false;
      }
      come.notify_one();
    }

    void Push(Job job) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(std::move(job));
      }
      come.notify_one();
    }

    // Hands what the caller's thread has begun to the lane's, ahead of all that came later.
    void HandOver(Job job) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_front(std::move(job));
        owned = false;
      }
      come.notify_one();
    }

    // The lane's thread. An empty job is the last.
    void Run() {
      while (true) {
        std::unique_lock<std::mutex> lock(mutex);
        come.wait(lock, [this] { return !owned && !jobs.empty(); });
        Job job = std::move(jobs.front());
        jobs.pop_front();
        if (!job.after) return;
        owned = true;
        lock.unlock();
        if (!job.has_begun) job.begin();
        while (!job.advance(true)) continue;
        job.take();
        lock.lock();
        owned = false;
        lock.unlock();
        job.after();
      }
    }

    std::mutex mutex;
    std::condition_variable come;
    std::deque<Job> jobs;
    bool owned = false;
  };

  Socket listener_;
  std::unique_ptr<Channel> channel_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_LANE_H_
