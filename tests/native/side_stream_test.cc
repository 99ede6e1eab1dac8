// The stream beside a compute stream, with fake GPUs: what it waits for, and when functions are
// called.

#include "ops/common/side_stream.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/native/check.h"
#include "tests/native/fake_gpus.h"

namespace {

using gmeta::SideStream;
using std::chrono::microseconds;
using std::chrono::milliseconds;

SideStream& Beside(fake::Stream* compute) {
  SideStream* side = nullptr;
  CHECK(SideStream::Beside(compute, &side) == GMETA_CUDA_OK);
  return *side;
}

void Queue(const SideStream& side, std::function<void()> job) {
  static_cast<fake::Stream*>(side.stream())->Push(std::move(job));
}

void Await(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::yield();
}

void OneForEachComputeStream() {
  fake::Stream one, other;
  CHECK(&Beside(&one) == &Beside(&one));
  CHECK(&Beside(&one) != &Beside(&other));
}

// Work follows what was queued on the compute stream before it, and doesn't wait for later work.
void FollowsEarlierWorkOnly() {
  fake::Stream compute;
  SideStream& side = Beside(&compute);
  std::atomic<bool> first{false}, second{false}, saw_first{false}, saw_second{true}, ended{false};
  std::atomic<bool> begin{false}, go_on{false};
  compute.Push([&] {
    Await(begin);
    first = true;
  });
  CHECK(side.Follow() == GMETA_CUDA_OK);
  compute.Push([&] {
    Await(go_on);
    second = true;
  });
  Queue(side, [&] {
    saw_first = first.load();
    saw_second = second.load();
  });
  const auto then = [&](int status) {
    CHECK(status == GMETA_CUDA_OK);
    ended = true;
  };
  CHECK(side.Then(microseconds(10), then) == GMETA_CUDA_OK);
  CHECK(!ended);  // the compute stream hasn't begun
  begin = true;
  Await(ended);  // although the compute stream is still busy
  CHECK(saw_first && !saw_second);
  go_on = true;
}

// Work that ends soon is waited for in place, other work on another thread, in any mixture.
void CallsWhereItEnds() {
  fake::Stream compute;
  SideStream& side = Beside(&compute);
  const auto here = std::this_thread::get_id();
  for (const bool is_soon : {true, false}) {
    std::atomic<bool> go_on{is_soon}, ended{false};
    std::thread::id where;
    Queue(side, [&] { Await(go_on); });
    const auto then = [&](int) {
      where = std::this_thread::get_id();
      ended = true;
    };
    CHECK(side.Then(is_soon ? microseconds(60'000'000) : microseconds(0), then) == GMETA_CUDA_OK);
    CHECK(ended == is_soon);
    go_on = true;
    Await(ended);
    CHECK((where == here) == is_soon);
  }
}

// Waiting for all that is queued.
void Awaits() {
  fake::Stream compute;
  SideStream& side = Beside(&compute);
  std::atomic<bool> ended{false};
  Queue(side, [&] {
    std::this_thread::sleep_for(milliseconds(5));
    ended = true;
  });
  side.Await();
  CHECK(ended);
}

// Many threads share a side stream: each function is called once, after its own work.
void ThreadsShareIt() {
  constexpr int kThreads = 8, kCalls = 200;
  fake::Stream compute;
  SideStream& side = Beside(&compute);
  std::atomic<int> called{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < kCalls; ++i) {
        const auto input = std::make_shared<std::atomic<int>>(0);
        const auto output = std::make_shared<std::atomic<int>>(0);
        compute.Push([input] { *input = 1; });
        CHECK(side.Follow() == GMETA_CUDA_OK);
        Queue(side, [input, output] { *output = *input + 1; });
        const auto then = [&called, output](int status) {
          CHECK(status == GMETA_CUDA_OK && *output == 2);
          ++called;
        };
        CHECK(side.Then(microseconds(random() % 3 * 20), then) == GMETA_CUDA_OK);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (called < kThreads * kCalls) std::this_thread::yield();
}

}  // namespace

int main() {
  OneForEachComputeStream();
  FollowsEarlierWorkOnly();
  CallsWhereItEnds();
  Awaits();
  ThreadsShareIt();
  return 0;
}
