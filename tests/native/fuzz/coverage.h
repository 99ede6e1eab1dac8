// What an execution did: which blocks of code it came through, how often, what it compared, and how
// much memory it held. coverage.cc has the functions that the compiler's instrumentation calls.
//
// Only the thread that called Start() is watched. Threads of the code under test come through their
// blocks in another order each time, which would be taken for news.

#ifndef GMETA_TESTS_NATIVE_FUZZ_COVERAGE_H_
#define GMETA_TESTS_NATIVE_FUZZ_COVERAGE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gmeta::fuzz {

// Two numbers of `width` bytes that were compared and weren't equal.
struct Comparison {
  uint64_t a;
  uint64_t b;
  size_t width;
};

class Coverage {
 public:
  static void Start();
  // Whether this execution came through a block for the first time, or many more times than any
  // before it.
  static bool Stop();
  static size_t blocks();  // that were ever come through

  // The last ones of the last execution.
  static std::vector<Comparison> Comparisons();
};

// The most memory that was held at one time since the last ResetPeak(), beyond what was held then.
class Memory {
 public:
  static void Watch();
  static void ResetPeak();
  static size_t peak();
};

}  // namespace gmeta::fuzz

#endif  // GMETA_TESTS_NATIVE_FUZZ_COVERAGE_H_
