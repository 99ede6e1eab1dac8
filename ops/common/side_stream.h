// A stream beside a GPU's compute stream, for work that no kernel of the present batch needs: the
// columns of a later batch, its keys and its rows.
//
//   Memory    TensorFlow's allocator is ordered by the compute stream: it gives out memory whose
//             last kernels may still be queued there. So work first allocates all its memory, then
//             calls Follow, which makes the side stream wait for what is queued on the compute
//             stream by then. Its inputs are complete at that point, too.
//   End       The compute stream doesn't wait for the side stream, except that calls of one table
//             follow each other (ops/table/gpu/table.cuh). Instead, the work has ended when the GPU
//             is done with it: Then calls a function at that time, which releases memory and lets
//             others use the results. So nobody needs to know on which stream a tensor was made.
//   Waiting   An executor of TensorFlow starts one GPU op after another on the same thread, so an
//             op that waits for the GPU keeps the others from being started. Work that ends within
//             a moment, as on an idle GPU, is waited for; other work by a thread of its own.

#ifndef GMETA_OPS_COMMON_SIDE_STREAM_H_
#define GMETA_OPS_COMMON_SIDE_STREAM_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ops/common/gpu/stream_abi.h"

namespace gmeta {

// Functions return a gmeta_cuda_status.
class SideStream {
 public:
  // Takes the status of the work. It runs on the side stream's thread, or in Then.
  using Ended = std::function<void(int status)>;

  // Finds the side stream of a compute stream of the current GPU. It is made at the first call, and
  // lives as long as the process.
  static int Beside(void* compute, SideStream** side) {
    static std::mutex* const mutex = new std::mutex;
    static auto* const sides = new std::map<void*, SideStream*>;
    std::lock_guard<std::mutex> lock(*mutex);
    SideStream*& found = (*sides)[compute];
    if (found == nullptr) {
      auto* const made = new SideStream(compute);
      const int status = made->Begin();
      if (status != GMETA_CUDA_OK) return status;  // `made` stays: its stream may be in use
      found = made;
    }
    *side = found;
    return GMETA_CUDA_OK;
  }

  void* stream() const { return stream_; }

  // Makes what is queued from now on wait for all that the compute stream has to do now. Several
  // threads may share the event, because it only ever moves to later work.
  int Follow() {
    const int status = gmeta_gpu_event_record(followed_, compute_);
    return status == GMETA_CUDA_OK ? gmeta_gpu_stream_wait(stream_, followed_) : status;
  }

  // Calls a function once all that is queued now is done: at once if that is soon, else on the side
  // stream's thread. If the status isn't OK, it isn't called.
  int Then(std::chrono::microseconds soon, Ended ended) {
    void* event = nullptr;
    int status = TakeEvent(&event);
    if (status == GMETA_CUDA_OK) status = gmeta_gpu_event_record(event, stream_);
    const auto until = std::chrono::steady_clock::now() + soon;
    int32_t happened = 0;
    while (status == GMETA_CUDA_OK && !happened && std::chrono::steady_clock::now() < until) {
      status = gmeta_gpu_event_query(event, &happened);
    }
    if (status != GMETA_CUDA_OK) return status;
    if (happened) {
      GiveEvent(event);
      ended(GMETA_CUDA_OK);
      return GMETA_CUDA_OK;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back({event, std::move(ended)});
    come_.notify_one();
    return GMETA_CUDA_OK;
  }

  // Waits for all that is queued, as far as the GPU still works.
  void Await() {
    void* event = nullptr;
    if (TakeEvent(&event) != GMETA_CUDA_OK) return;
    if (gmeta_gpu_event_record(event, stream_) == GMETA_CUDA_OK) gmeta_gpu_event_await(event);
    GiveEvent(event);
  }

 private:
  struct Waiting {
    void* event;
    Ended ended;
  };

  explicit SideStream(void* compute) : compute_(compute) {}

  int Begin() {
    int32_t device = 0;
    int status = gmeta_gpu_device(&device, nullptr, 0);
    if (status == GMETA_CUDA_OK) status = gmeta_gpu_stream_create(0, &stream_, &followed_);
    if (status == GMETA_CUDA_OK) std::thread([this, device] { Work(device); }).detach();
    return status;
  }

  void Work(int32_t device) {
    const int used = gmeta_gpu_use(device);
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      come_.wait(lock, [this] { return !waiting_.empty(); });
      const Waiting first = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      const int status = used == GMETA_CUDA_OK ? gmeta_gpu_event_await(first.event) : used;
      GiveEvent(first.event);
      first.ended(status);
    }
  }

  int TakeEvent(void** event) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!events_.empty()) {
        *event = events_.back();
        events_.pop_back();
        return GMETA_CUDA_OK;
      }
    }
    return gmeta_gpu_stream_create(0, nullptr, event);
  }

  void GiveEvent(void* event) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(event);
  }

  void* const compute_;
  void *stream_ = nullptr, *followed_ = nullptr;
  std::mutex mutex_;
  std::condition_variable come_;
  std::deque<Waiting> waiting_;
  std::vector<void*> events_;  // that nobody uses
};

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_SIDE_STREAM_H_
