// GPUs and NCCL made of threads, for the lane's tests: a stream is a thread that does one job after
// another, a group of NCCL's calls is a job, and ranks that call differently hang, as they do with
// NCCL. Memory is the host's.

#ifndef GMETA_TESTS_NATIVE_FAKE_GPUS_H_
#define GMETA_TESTS_NATIVE_FAKE_GPUS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/common/gpu/stream_abi.h"
#include "ops/lane/nccl.h"

namespace fake {

struct Stream {
  Stream() : thread([this] { Work(); }) {}
  ~Stream() {
    Push({});
    thread.join();
  }

  void Push(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex);
    jobs.push_back(std::move(job));
    come.notify_one();
  }

  void Work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex);
      come.wait(lock, [this] { return !jobs.empty(); });
      const auto job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      if (!job) return;
      job();
    }
  }

  std::mutex mutex;
  std::condition_variable come;
  std::deque<std::function<void()>> jobs;
  std::thread thread;
};

// Shared with the jobs that look at it later.
struct Event {
  struct State {
    std::atomic<int> recorded{0}, reached{0};
  };
  std::shared_ptr<State> state = std::make_shared<State>();
};

// What the ranks of a communicator share.
struct World {
  std::mutex mutex;
  std::condition_variable come;
  int joined = 0, left = 0;
  std::map<std::pair<int, int>, std::deque<std::string>> mail;  // from, to
  std::map<int, std::vector<std::vector<float>>> terms;         // of an allreduce
  bool Wait(std::unique_lock<std::mutex>* lock, const std::atomic<bool>& aborted,
            const std::function<bool()>& ready) {
    while (!ready()) {
      if (aborted) return false;
      come.wait_for(*lock, std::chrono::milliseconds(1));
    }
    return true;
  }
};

struct Comm {
  Comm(std::shared_ptr<World> world, int rank, int size)
      : world(std::move(world)), rank(rank), size(size) {}

  std::shared_ptr<World> world;
  int rank, size;
  std::atomic<bool> aborted{false};
  int allreduces = 0;
};

inline std::shared_ptr<World> Find(const std::string& id) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<World>> worlds;
  std::lock_guard<std::mutex> lock(mutex);
  auto& world = worlds[id];
  if (world == nullptr) world = std::make_shared<World>();
  return world;
}

// The calls of a group, and the stream that they are for.
struct Group {
  bool open = false;
  std::vector<std::function<void()>> calls;
  Stream* stream = nullptr;
};
inline Group& ThisGroup() {
  thread_local Group group;
  return group;
}
inline int Add(void* stream, std::function<void()> call) {
  if (!ThisGroup().open) return 5;
  ThisGroup().stream = static_cast<Stream*>(stream);
  ThisGroup().calls.push_back(std::move(call));
  return 0;
}

inline gmeta::lane::Nccl MakeNccl() {
  gmeta::lane::Nccl nccl;
  nccl.get_version = [](int* version) { return *version = 22304, 0; };
  nccl.get_unique_id = [](gmeta::lane::Nccl::Id* id) {
    static std::atomic<int> number{0};
    std::memset(id->bytes, 0, sizeof id->bytes);
    std::snprintf(id->bytes, sizeof id->bytes, "world %d", ++number);
    return 0;
  };
  nccl.comm_init_rank = [](void** comm, int size, gmeta::lane::Nccl::Id id, int rank) {
    static std::mutex mutex;
    static std::deque<Comm> comms;  // for ever, as jobs may still look at one that was aborted
    Comm* made;
    {
      std::lock_guard<std::mutex> lock(mutex);
      made = &comms.emplace_back(Find(id.bytes), rank, size);
    }
    *comm = made;
    std::unique_lock<std::mutex> lock(made->world->mutex);
    ++made->world->joined;
    made->world->Wait(&lock, made->aborted, [&] { return made->world->joined >= size; });
    return 0;
  };
  nccl.comm_abort = [](void* comm) {
    static_cast<Comm*>(comm)->aborted = true;
    return 0;
  };
  nccl.comm_get_async_error = [](void*, int* error) { return *error = 0, 0; };
  nccl.get_error_string = [](int code) { return code == 5 ? "invalid usage" : "an error"; };
  nccl.group_start = [] {
    ThisGroup() = {true, {}, nullptr};
    return 0;
  };
  nccl.group_end = [] {
    Group group = std::exchange(ThisGroup(), {});
    if (group.stream == nullptr) return 0;
    group.stream->Push([calls = group.calls] {
      for (const auto& call : calls) call();
    });
    return 0;
  };
  // A group's sends come first, as they don't wait.
  nccl.send = [](const void* data, size_t count, int, int to, void* comm, void* stream) {
    auto* const own = static_cast<Comm*>(comm);
    const auto call = [=] {
      std::lock_guard<std::mutex> lock(own->world->mutex);
      own->world->mail[{own->rank, to}].emplace_back(static_cast<const char*>(data), count);
      own->world->come.notify_all();
    };
    const int code = Add(stream, nullptr);
    if (code == 0) {
      auto& calls = ThisGroup().calls;
      calls.pop_back();
      calls.insert(calls.begin(), call);
    }
    return code;
  };
  nccl.recv = [](void* data, size_t count, int, int from, void* comm, void* stream) {
    auto* const own = static_cast<Comm*>(comm);
    return Add(stream, [=] {
      std::unique_lock<std::mutex> lock(own->world->mutex);
      auto& mail = own->world->mail[{from, own->rank}];
      if (!own->world->Wait(&lock, own->aborted, [&] { return !mail.empty(); })) return;
      if (mail.front().size() != count) std::abort();
      std::memcpy(data, mail.front().data(), count);
      mail.pop_front();
    });
  };
  nccl.all_reduce = [](const void* from, void* to, size_t count, int type, int, void* comm,
                       void* stream) {
    auto* const own = static_cast<Comm*>(comm);
    if (type != gmeta::lane::Nccl::kFloat) return 4;
    const int number = own->allreduces++;
    return Add(stream, [=] {
      const float* const term = static_cast<const float*>(from);
      std::unique_lock<std::mutex> lock(own->world->mutex);
      auto& terms = own->world->terms[number];
      terms.resize(static_cast<size_t>(own->size));
      terms[own->rank].assign(term, term + count);
      own->world->come.notify_all();
      const auto all = [&] {
        for (const auto& each : terms) {
          if (each.size() != count) return false;
        }
        return true;
      };
      if (!own->world->Wait(&lock, own->aborted, all)) return;
      std::vector<float> sums(count);
      for (const auto& each : terms) {
        for (size_t i = 0; i < count; ++i) sums[i] += each[i];
      }
      std::memcpy(to, sums.data(), count * sizeof(float));
    });
  };
  return nccl;
}

}  // namespace fake

inline const char* gmeta_cuda_error(void) { return "a fake error"; }

inline int gmeta_gpu_device(int32_t* device, char* address, size_t size) {
  *device = 0;
  return GMETA_CUDA_OK;
}
inline int gmeta_gpu_use(int32_t) { return GMETA_CUDA_OK; }
inline int gmeta_gpu_stream_create(int32_t, void** stream, void** event) {
  if (stream != nullptr) *stream = new fake::Stream;
  if (event != nullptr) *event = new fake::Event;
  return GMETA_CUDA_OK;
}
inline int gmeta_gpu_stream_destroy(void* stream, void* event) {
  delete static_cast<fake::Stream*>(stream);
  delete static_cast<fake::Event*>(event);
  return GMETA_CUDA_OK;
}
inline int gmeta_gpu_event_record(void* event, void* stream) {
  const auto state = static_cast<fake::Event*>(event)->state;
  const int number = ++state->recorded;
  static_cast<fake::Stream*>(stream)->Push([=] { state->reached = number; });
  return GMETA_CUDA_OK;
}
inline int gmeta_gpu_stream_wait(void* stream, void* event) {
  const auto state = static_cast<fake::Event*>(event)->state;
  const int number = state->recorded;
  static_cast<fake::Stream*>(stream)->Push([=] {
    while (state->reached < number) std::this_thread::yield();
  });
  return GMETA_CUDA_OK;
}
inline int gmeta_gpu_event_query(void* event, int32_t* happened) {
  const auto state = static_cast<fake::Event*>(event)->state;
  *happened = state->reached >= state->recorded;
  return GMETA_CUDA_OK;
}
inline int gmeta_gpu_event_await(void* event) {
  const auto state = static_cast<fake::Event*>(event)->state;
  const int number = state->recorded;
  while (state->reached < number) std::this_thread::yield();
  return GMETA_CUDA_OK;
}

#endif  // GMETA_TESTS_NATIVE_FAKE_GPUS_H_
