// The lane of tensors in GPU memory: collectives of NCCL, in the order of the program.
//
// Layout. A rank has one communicator of NCCL, on the GPU that is current when the lane is made,
// and one stream of its own. Beside it is a channel over TCP (channel.h), also its own, which
// carries no data: it compares what ranks are about to do, and shows which rank is lost.
//
// A collective waits on the lane's stream for what the compute stream had queued when it began, and
// a thread of the host waits for its end (`Advance`). The compute stream waits for nothing, so
// other work overlaps the exchange. The caller keeps the tensors until the end.
//
// Invariants. The order of collectives is the program's, the same on all ranks, and one begins when
// the last has ended. NCCL compares nothing, and ranks that call it differently hang. So the first
// time that a rank reaches a collective of a certain kind, name, type and width, the ranks compare
// these over the channel. Each remembers what was compared, so ranks that retrace a function at
// different times still compare in the same collectives. The number of rows from each rank to each
// isn't compared: sender and receiver both compute it from the keys that they have exchanged.
//
// Two lanes can't wait for each other. The collectives of both are in one order, in which they were
// traced, and each lane keeps its part of it. Of all that haven't ended, take the first: what it
// depends on, by data or by its lane, came before it and has ended on all ranks. So all ranks reach
// it, and it ends. This holds because a collective that waits keeps neither a thread of TensorFlow
// nor the compute stream from other work.
//
// Horovod has a communicator of NCCL too, and two of them at work on one GPU may hang. While a lane
// is open Horovod doesn't use its own: what is exchanged beside the lane, by other threads, is
// placed in host memory (tensors.py), and what the main thread still passes to it on the GPU, such
// as the initial weights and objects, it passes between steps: a step has returned only when its
// collectives have ended.
//
// Failure. While it waits, the thread looks for closed connections, for notices of failed ranks and
// for errors of NCCL; it gives up when its patience ends. Patience begins when the rank's own GPU
// is ready. Halfway a rank notifies the others that it waits, so at the end the ranks without
// notice are those that didn't come. Then the communicator is aborted, so that nothing accesses the
// tensors, and the collective fails. Where NCCL first connects two GPUs, its own functions wait for
// the other rank, and detect by themselves that it is gone.
//
// Why it is fast. Nothing is agreed on, and no size travels. All parts of an alltoall, and all
// tensors of an allreduce, are one launch. A caller's thread queues it and polls for its end for
// some microseconds, so a small exchange costs no change of threads.

#ifndef GMETA_OPS_LANE_NCCL_LANE_H_
#define GMETA_OPS_LANE_NCCL_LANE_H_

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/common/gpu/stream_abi.h"
#include "ops/lane/lane.h"
#include "ops/lane/nccl.h"

namespace gmeta::lane {

class NcclLane {
 public:
  static constexpr std::chrono::microseconds kLook{50};  // before another thread waits
  static constexpr std::chrono::microseconds kYield{500};
  static constexpr std::chrono::microseconds kNap{20}, kLongNap{500};
  static constexpr milliseconds kShort{20};    // until an exchange is a long one
  static constexpr milliseconds kWatch{50};    // between two checks of the other ranks
  static constexpr milliseconds kGrace{1000};  // for a collective that a lost rank may have ended

  Counts alltoalls, allreduces;

  // A tensor of an allreduce, in memory of the GPU.
  struct Term {
    const void* from;
    void* to;
    size_t elements;
  };

  explicit NcclLane(const Nccl& nccl) : nccl_(nccl) {}

  ~NcclLane() {
    lane_.Close();
    if (device_ >= 0 && gmeta_gpu_use(device_) == GMETA_CUDA_OK) {
      AbortComm();
      gmeta_gpu_stream_destroy(stream_, ready_);
      gmeta_gpu_stream_destroy(nullptr, ended_);
    }
  }

  std::string Listen(Address* address) { return lane_.Listen(address); }

  // Connects the ranks' channels, then their communicators; `id` is the one that rank 0 has made.
  std::string Connect(int rank, const std::vector<Address>& addresses, const std::string& key,
                      milliseconds start, milliseconds patience, const std::string& id) {
    std::string why;
    if (id.size() != sizeof(Nccl::Id)) return "the id of its communicator isn't an id of NCCL";
    if (why.empty()) why = Cuda(gmeta_gpu_device(&device_, nullptr, 0));
    if (why.empty()) why = Cuda(gmeta_gpu_stream_create(1, &stream_, &ready_));
    if (why.empty()) why = Cuda(gmeta_gpu_stream_create(1, nullptr, &ended_));
    if (why.empty()) why = lane_.Connect(rank, addresses, key, start, patience, "");
    if (why.empty()) why = OpenComm(rank, static_cast<int>(addresses.size()), id, start);
    patience_ = patience;
    is_open_ = why.empty();
    return why;
  }

  bool is_open() const { return is_open_; }
  int rank() const { return lane_.rank(); }
  int size() const { return lane_.size(); }
  const std::string& failure() const { return failed_; }
  void Run(Lane::Job job) { lane_.Run(std::move(job)); }
  Abort& abort() { return lane_.abort(); }

  // Sends rank r the next `sends[r]` bytes of `from`, and receives `receives[r]` bytes from each
  // rank in `to`, once all is done that `compute` has queued. `Advance` ends it.
  void BeginAlltoall(const Call& call, const void* from, std::vector<size_t> sends, void* to,
                     std::vector<size_t> receives, void* compute) {
    Begin(call, compute, [=, sends = std::move(sends), receives = std::move(receives)] {
      const char* source = static_cast<const char*>(from);
      char* target = static_cast<char*>(to);
      int code = Nccl::kSuccess;
      for (int r = 0; r < size() && code == Nccl::kSuccess; ++r) {
        if (sends[r] > 0) code = nccl_.send(source, sends[r], Nccl::kBytes, r, comm_, stream_);
        if (receives[r] > 0 && code == Nccl::kSuccess) {
          code = nccl_.recv(target, receives[r], Nccl::kBytes, r, comm_, stream_);
        }
        source += sends[r];
        target += receives[r];
      }
      return code;
    });
  }

  void BeginAllreduce(const Call& call, std::vector<Term> terms, Nccl::Type type, void* compute) {
    Begin(call, compute, [=, terms = std::move(terms)] {
      int code = Nccl::kSuccess;
      for (const Term& term : terms) {
        if (term.elements == 0) continue;
        code =
            nccl_.all_reduce(term.from, term.to, term.elements, type, Nccl::kSum, comm_, stream_);
        if (code != Nccl::kSuccess) break;
      }
      return code;
    });
  }

  // As Channel::Advance.
  bool Advance(bool may_sleep) {
    if (phase_ == Phase::kIdle) return true;
    if (std::string why = Cuda(gmeta_gpu_use(device_)); !why.empty()) return Fail(why, Here());
    if (phase_ == Phase::kCompare) {
      if (!lane_.Advance(may_sleep)) return false;
      if (!lane_.failure().empty()) return Fail(lane_.failure(), "");
      phase_ = Phase::kQueue;
    }
    if (phase_ == Phase::kQueue) {
      std::string why = Queue();
      if (!why.empty()) return Fail(LostRank().value_or(why), Here());
      phase_ = Phase::kRun;
      queued_ = ready_at_ = watched_ = Clock::now();
    }
    return Wait(may_sleep);
  }

 private:
  enum class Phase { kIdle, kCompare, kQueue, kRun };

  void Begin(const Call& call, void* compute, std::function<int()> launch) {
    if (!failed_.empty()) return;
    call_ = call;
    here_ = Frame(call, number_++);
    launch_ = std::move(launch);
    is_ready_ = has_told_ = false;
    lost_.clear();
    std::string why = Cuda(gmeta_gpu_use(device_));
    if (why.empty()) why = Cuda(gmeta_gpu_event_record(ready_, compute));
    if (!why.empty()) {
      Fail(why, Here());
      return;
    }
    const bool is_new = compared_.emplace(call.kind, call.width, call.type, call.name).second;
    phase_ = is_new ? Phase::kCompare : Phase::kQueue;
    if (is_new) lane_.channel()->BeginCheck(call);
  }

  std::string Queue() {
    if (std::string why = Cuda(gmeta_gpu_stream_wait(stream_, ready_)); !why.empty()) return why;
    std::string why = Said(nccl_.group_start());
    if (!why.empty()) return why;
    why = Said(launch_());
    const std::string at_end = Said(nccl_.group_end());  // in any case, or the thread stays in it
    if (why.empty()) why = at_end;
    return why.empty() ? Cuda(gmeta_gpu_event_record(ended_, stream_)) : why;
  }

  bool Wait(bool may_sleep) {
    while (true) {
      const Clock::time_point now = Clock::now();
      bool has_ended = false;
      if (std::string why = See(now, &has_ended); !why.empty()) return Fail(why, Here());
      if (has_ended) {
        phase_ = Phase::kIdle;
        return true;
      }
      if (now - queued_ >= kLook && !may_sleep) return false;
      if (now - watched_ >= kWatch) {
        watched_ = now;
        if (Watch(now)) return true;
      }
      // An exchange may be short, and begin after a long computation, when the GPU is ready.
      const auto waited = now - (is_ready_ ? ready_at_ : queued_);
      if (waited < kYield) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(!is_ready_ || waited < kShort ? kNap : kLongNap);
      }
    }
  }

  // Asks only for the event that comes next: a query delays the kernels that other threads start.
  std::string See(Clock::time_point now, bool* has_ended) {
    int32_t happened = 0;
    std::string why;
    if (!is_ready_) {
      why = Cuda(gmeta_gpu_event_query(ready_, &happened));
      is_ready_ = happened != 0;
      ready_at_ = now;
    }
    if (is_ready_ && why.empty()) {
      why = Cuda(gmeta_gpu_event_query(ended_, &happened));
      *has_ended = happened != 0;
    }
    return why;
  }

  // Checks whether the collective can still end; returns whether it has failed.
  bool Watch(Clock::time_point now) {
    Channel& channel = *lane_.channel();
    if (const std::string why = channel.abort().Because(); !why.empty()) return Fail(why, "");
    int error = Nccl::kSuccess;
    nccl_.comm_get_async_error(comm_, &error);
    if (error != Nccl::kSuccess && error != Nccl::kInProgress) {
      return Fail(LostRank().value_or(Said(error)), Here());
    }
    if (lost_.empty()) {
      lost_ = channel.Hear();
      lost_at_ = now;
    } else if (now - lost_at_ >= kGrace) {
      return Fail(lost_, Here());
    }
    if (patience_.count() == 0) return false;
    if (!has_told_ && now - ready_at_ >= patience_ / 2) {
      channel.TellWaiting(here_.sequence);
      has_told_ = true;
    }
    if (now - ready_at_ < patience_) return false;
    const std::string absent = channel.AbsentFrom(here_.sequence, call_);
    return Fail("timed out: " + (absent.empty() ? "NCCL, in which all ranks are," : absent) +
                    " did not come within " + std::to_string(patience_.count() / 1000) + " s",
                " to " + here_.Text());
  }

  // Which rank is lost, if the others show it within a moment.
  std::optional<std::string> LostRank() {
    for (const auto until = Clock::now() + kGrace; Clock::now() < until;) {
      if (std::string why = lane_.channel()->Hear(); !why.empty()) return why;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return std::nullopt;
  }

  std::string Here() const {
    return ", while rank " + std::to_string(rank()) + " is in " + here_.Text() + " of GPUs";
  }

  bool Fail(const std::string& cause, const std::string& where) {
    failed_ = cause + where;
    phase_ = Phase::kIdle;
    lane_.channel()->GiveUp(cause, where);
    AbortComm();
    return true;
  }

  // The ranks call it together. NCCL has no deadline, so another thread waits for it.
  std::string OpenComm(int rank, int size, const std::string& id, milliseconds start) {
    struct Opening {
      Nccl nccl;
      int32_t device;
      Nccl::Id id;
      Nccl::Comm comm = nullptr;
      std::string why;
      std::atomic<bool> done{false};
    };
    const auto opening = std::make_shared<Opening>();
    opening->nccl = nccl_;
    opening->device = device_;
    std::memcpy(opening->id.bytes, id.data(), sizeof opening->id.bytes);
    std::thread([=] {
      opening->why = Cuda(gmeta_gpu_use(opening->device));
      if (opening->why.empty()) {
        const int code = opening->nccl.comm_init_rank(&opening->comm, size, opening->id, rank);
        opening->why = Said(opening->nccl, code);
      }
      opening->done.store(true, std::memory_order_release);
    }).detach();
    const Clock::time_point deadline = Clock::now() + start;
    while (!opening->done.load(std::memory_order_acquire)) {
      if (Clock::now() >= deadline) return "timed out: NCCL didn't connect the GPUs";
      if (std::string why = lane_.channel()->Hear(); !why.empty()) return why;
      std::this_thread::sleep_for(milliseconds(1));
    }
    comm_ = opening->comm;
    return opening->why;
  }

  // Ends what runs on the GPU, and waits for that; for a moment only, in case NCCL itself hangs.
  void AbortComm() {
    const Nccl::Comm comm = std::exchange(comm_, nullptr);
    if (comm == nullptr) return;
    const auto done = std::make_shared<std::atomic<bool>>(false);
    std::thread([done, comm, abort = nccl_.comm_abort, device = device_] {
      gmeta_gpu_use(device);
      abort(comm);
      *done = true;
    }).detach();
    bool is_last = false;  // the event follows all that the lane has queued
    for (const auto until = Clock::now() + milliseconds(5000); Clock::now() < until;) {
      if (*done && !is_last) {
        if (gmeta_gpu_event_record(ended_, stream_) != GMETA_CUDA_OK) return;
        is_last = true;
      }
      int32_t happened = 0;
      if (is_last && (gmeta_gpu_event_query(ended_, &happened) != GMETA_CUDA_OK || happened))
        return;
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  static std::string Cuda(int status) { return status == GMETA_CUDA_OK ? "" : gmeta_cuda_error(); }
  static std::string Said(const Nccl& nccl, int code) {
    if (code == Nccl::kSuccess || code == Nccl::kInProgress) return "";
    return std::string("NCCL says: ") + nccl.get_error_string(code);
  }
  std::string Said(int code) const { return Said(nccl_, code); }

  const Nccl nccl_;
  Nccl::Comm comm_ = nullptr;
  int32_t device_ = -1;
  void *stream_ = nullptr, *ready_ = nullptr, *ended_ = nullptr;
  milliseconds patience_{0};
  bool is_open_ = false;
  uint64_t number_ = 0;
  std::set<std::tuple<Kind, uint64_t, std::string, std::string>> compared_;
  std::string failed_;
  // The collective in progress.
  Phase phase_ = Phase::kIdle;
  Call call_;
  Frame here_;
  std::function<int()> launch_;
  Clock::time_point queued_, ready_at_, watched_, lost_at_;
  bool is_ready_ = false, has_told_ = false;
  std::string lost_;
  Lane lane_;  // last, so that its thread ends first
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_NCCL_LANE_H_
