// The parallel_for that the native tests hand to the engine: on this thread, or on some of their
// own.

#ifndef GMETA_TESTS_NATIVE_PARALLEL_H_
#define GMETA_TESTS_NATIVE_PARALLEL_H_

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

struct Serial {
  template <class Work>
  void operator()(size_t total, size_t, const Work& work) const {
    if (total > 0) work(size_t{0}, total);
  }
};

struct Threads {
  size_t threads;

  template <class Work>
  void operator()(size_t total, size_t, const Work& work) const {
    const size_t share = (total + threads - 1) / threads;
    std::vector<std::thread> running;
    for (size_t begin = 0; begin < total; begin += share) {
      running.emplace_back([&, begin] { work(begin, std::min(total, begin + share)); });
    }
    for (std::thread& thread : running) thread.join();
  }
};

#endif  // GMETA_TESTS_NATIVE_PARALLEL_H_
