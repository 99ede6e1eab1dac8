// ForEach: a parallel loop whose body may throw.

#ifndef GMETA_OPS_COMMON_FOR_EACH_H_
#define GMETA_OPS_COMMON_FOR_EACH_H_

#include <cstddef>
#include <exception>
#include <mutex>

namespace gmeta {

// Calls work(i) for each i below n, by parallel_for(n, cost, range work). An exception must not
// leave a worker's thread: the first one is thrown to the caller after all calls have ended.
template <class ParallelFor, class Work>
void ForEach(const ParallelFor& parallel_for, size_t n, size_t cost, const Work& work) {
  std::mutex mutex;
  std::exception_ptr first;
  parallel_for(n, cost, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      try {
        work(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!first) first = std::current_exception();
      }
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_FOR_EACH_H_
