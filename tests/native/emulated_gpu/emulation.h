// A GPU of one multiprocessor at a time, on the CPU: enough of CUDA for the kernels of attention,
// of tables and of deduplication to run as they stand, compiled by g++.
//
// Layout. A block's threads are fibers (ucontext) of one thread of the CPU. The folder beside this
// header holds headers of the names that kernels include: CUDA's (cuda_runtime.h and others), and
// in place of the files that are PTX or ask the driver (hopper.cuh, wgmma_instructions.cuh,
// tensor_map.cuh, relaxed_read.cuh, cuda_launch.cuh) what those do in C++. They come first in the
// include path; all else is the kernels' own code.
//
// Order. A fiber runs until it has to wait for others, and says by a predicate for what. They take
// turns in a ring; from where on it is gone through is drawn for each round. What runs
// asynchronously on a GPU, copies and products of matrices, happens as early as it may
// (Pace::kEarly), or as late (kLate): a copy when nothing else can go on, a product when it is
// waited for. A missing wait, a buffer that is given back too soon or a register that is used too
// early so gives wrong numbers under one of the two. Where all wait for each other the program says
// so, and ends.
//
// What it doesn't show: how fast anything is, races of two threads that never wait between their
// accesses, and limits such as registers.

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_EMULATION_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_EMULATION_H_

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

enum class Pace { kEarly, kLate };

// Set by a test, for the launches that follow.
struct Settings {
  Pace pace = Pace::kEarly;
  uint32_t seed = 0;
  int multiprocessors = 3;
};
inline Settings settings;

[[noreturn]] inline void Fail(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::abort();
}

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// A product of matrices that a thread has asked for (wgmma_instructions.cuh).
struct Product {
  float* sums;
  int columns;
  bool left_in_registers;
  uint64_t left;
  const uint32_t* left_registers;
  uint64_t right;
  bool add;
  bool right_transposed;
  bool bfloat16;
};

inline constexpr size_t kStackBytes = 128 << 10;

// A thread's stack. The stacks of threads that have ended are used again, because a sanitizer maps
// each new one.
class Stack {
 public:
  Stack() {
    if (Free().empty()) {
      bytes_.reset(new char[kStackBytes]);
      return;
    }
    bytes_ = std::move(Free().back());
    Free().pop_back();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(bytes_.get(), kStackBytes);  // the frames of the thread before
#endif
  }
  ~Stack() { Free().push_back(std::move(bytes_)); }
  char* get() const { return bytes_.get(); }

 private:
  static std::vector<std::unique_ptr<char[]>>& Free() {
    static std::vector<std::unique_ptr<char[]>> free;
    return free;
  }

  std::unique_ptr<char[]> bytes_;
};

struct Fiber {
  Index index;
  ucontext_t context;
  jmp_buf place;  // where it goes on
  bool begun = false;
  Stack stack;
  std::function<bool()> ready;  // none: it needn't wait
  bool done = false;
  // Products by the number of their group; those of the group that isn't closed yet have `groups`.
  std::deque<std::pair<int, Product>> products;
  int groups = 0;
  std::deque<std::function<void()>> sent;  // copies from shared memory that are still to come
};

// Threads that wait for each other, some number of times.
struct Meeting {
  int there = 0;
  int times = 0;
};

class Block {
 public:
  Block(Index block, Index grid, int threads, std::function<void()> kernel)
      : block_index(block),
        grid_size(grid),
        block_size{static_cast<unsigned>(threads), 1, 1},
        kernel_(std::move(kernel)),
        random_(settings.seed + block.x) {
    warps.resize((threads + 31) / 32);
    for (int i = 0; i < threads; ++i) {
      fibers.push_back(std::make_unique<Fiber>());
      fibers.back()->index.x = static_cast<unsigned>(i);
    }
  }

  void Run() {
    current = this;
    for (auto& each : fibers) {
      getcontext(&each->context);
      each->context.uc_stack.ss_sp = each->stack.get();
      each->context.uc_stack.ss_size = kStackBytes;
      each->context.uc_link = &scheduler_;
      makecontext(&each->context, &Block::Enter, 0);
    }
    std::vector<Fiber*> order;
    for (auto& each : fibers) order.push_back(each.get());
    for (bool all_done = false; !all_done;) {
      std::rotate(order.begin(), order.begin() + random_() % order.size(), order.end());
      bool any = false;
      all_done = true;
      for (Fiber* each : order) {
        if (each->done) continue;
        all_done = false;
        if (each->ready && !each->ready()) continue;
        any = true;
        Resume(each);
      }
      if (all_done || any) continue;
      if (copies.empty()) Fail("all threads of a block wait for each other");
      const size_t which = random_() % copies.size();
      const auto copy = copies[which];
      copies.erase(copies.begin() + static_cast<int64_t>(which));
      copy();
    }
    while (!copies.empty()) copies.front()(), copies.erase(copies.begin());
    current = nullptr;
  }

  // By the fiber that runs: others run until `ready`.
  void Await(std::function<bool()> ready) {
    if (ready()) return;
    fiber->ready = std::move(ready);
    SwitchToScheduler(false);
    fiber->ready = nullptr;
  }

  void Copy(std::function<void()> copy) {
    if (settings.pace == Pace::kEarly) {
      copy();
    } else {
      copies.push_back(std::move(copy));
    }
  }

  // A copy from shared memory that the running fiber asks for: as late as it is waited for.
  void Send(std::function<void()> copy) {
    fiber->sent.push_back(std::move(copy));
    if (settings.pace == Pace::kEarly) SendAllBut(0);
  }
  void SendAllBut(size_t count) {
    for (auto& sent = fiber->sent; sent.size() > count; sent.pop_front()) sent.front()();
  }

  void Meet(Meeting* meeting, int threads) {
    const int times = meeting->times;
    Arrive(meeting, threads);
    Await([=] { return meeting->times != times; });
  }
  static void Arrive(Meeting* meeting, int threads) {
    if (++meeting->there == threads) meeting->there = 0, ++meeting->times;
  }

  struct Warp {
    Meeting meeting;
    uint64_t words[32];
    std::vector<float> numbers;  // for what its lanes compute together
  };
  Warp& warp() { return warps[fiber->index.x / 32]; }
  int lane() const { return static_cast<int>(fiber->index.x % 32); }
  void MeetWarp() { Meet(&warp().meeting, 32); }
  // What each lane of the warp brings.
  const uint64_t* Exchange(uint64_t word) {
    MeetWarp();  // all have read what was exchanged before
    warp().words[lane()] = word;
    MeetWarp();
    return warp().words;
  }

  static Block* current;
  const Index block_index, grid_size, block_size;
  Fiber* fiber = nullptr;  // that runs
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Meeting all, named[16];
  std::vector<std::function<void()>> copies;  // that were asked for, and are still to come

 private:
  static void Enter() {
    Block* const block = current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block->scheduler_stack_, &block->scheduler_bytes_);
#endif
    block->kernel_();
    if (!block->fiber->sent.empty()) Fail("a block ends before what it sends has been read");
    block->fiber->done = true;
    block->SwitchToScheduler(true);
  }

  // _setjmp and _longjmp make no system call, as swapcontext does; the address sanitizer wants
  // that.
#if defined(__SANITIZE_ADDRESS__)
  void Resume(Fiber* to) {
    fiber = to;
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, to->stack.get(), kStackBytes);
    swapcontext(&scheduler_, &to->context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
  }

  void SwitchToScheduler(bool last) {
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, scheduler_stack_, scheduler_bytes_);
    swapcontext(&fiber->context, &scheduler_);
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_bytes_);
  }
#else
  void Resume(Fiber* to) {
    fiber = to;
    if (_setjmp(scheduler_place_) != 0) return;
    if (to->begun) _longjmp(to->place, 1);
    to->begun = true;
    setcontext(&to->context);
  }

  void SwitchToScheduler(bool) {
    if (_setjmp(fiber->place) == 0) _longjmp(scheduler_place_, 1);
  }
#endif

  const std::function<void()> kernel_;
  std::mt19937 random_;
  ucontext_t scheduler_;
  jmp_buf scheduler_place_;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_bytes_ = 0;
#endif
};
inline Block* Block::current = nullptr;

inline Block& Current() { return *Block::current; }

// The memory that a launch's blocks share among their threads, as much as a multiprocessor has.
inline constexpr size_t kSharedBytes = 227 << 10;
alignas(1024) inline char shared_memory[kSharedBytes];
inline uint32_t SharedOffset(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - shared_memory;
  if (offset < 0 || offset >= static_cast<int64_t>(kSharedBytes)) Fail("not in shared memory");
  return static_cast<uint32_t>(offset);
}

// One block after another. What they find in shared memory is garbage.
inline void Launch(unsigned blocks, int threads, const std::function<void()>& kernel) {
  for (unsigned i = 0; i < blocks; ++i) {
    std::fill(shared_memory, shared_memory + kSharedBytes, char(0xA5));
    Block({i, 0, 0}, {blocks, 1, 1}, threads, kernel).Run();
  }
}

}  // namespace emulated

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_EMULATION_H_
