// The functions that gcc's -fsanitize-coverage=trace-pc,trace-cmp calls, and the sanitizer's hooks
// of malloc and free. Compiled without instrumentation itself.

#include "tests/native/fuzz/coverage.h"

#include <algorithm>
#include <atomic>
#include <cstring>

extern "C" {
extern char __executable_start, etext;  // the linker's
// The sanitizer's; gcc doesn't install the header that declares them.
int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t),
                                              void (*)(const volatile void*));
size_t __sanitizer_get_allocated_size(const volatile void*);
}

namespace gmeta::fuzz {
namespace {

constexpr size_t kKept = 512;        // comparisons
constexpr size_t kBlocks = 1 << 17;  // of an execution

thread_local bool watched = false;
std::vector<uint8_t> counts, seen;  // of each address of the program's code
std::vector<size_t> touched;        // never grows while an execution is watched
size_t covered = 0;
Comparison comparisons[kKept];
size_t compared = 0;

std::atomic<int64_t> held{0}, most{0}, held_before{0};

// 1, 2, 3, 4 to 7, 8 to 15, 16 to 31, 32 to 127, more: a bit each.
uint8_t Bucket(uint8_t count) {
  if (count < 4) return static_cast<uint8_t>(1u << (count - 1));
  return count < 8 ? 8 : count < 16 ? 16 : count < 32 ? 32 : count < 128 ? 64 : 128;
}

void Compared(uint64_t a, uint64_t b, size_t width) {
  if (watched && a != b) comparisons[compared++ % kKept] = {a, b, width};
}

void OnMalloc(const volatile void*, size_t size) {
  const int64_t now = held.fetch_add(static_cast<int64_t>(size)) + static_cast<int64_t>(size);
  int64_t before = most;
  while (now > before && !most.compare_exchange_weak(before, now)) {
  }
}

void OnFree(const volatile void* memory) {
  if (memory == nullptr) return;
  held -= static_cast<int64_t>(__sanitizer_get_allocated_size(memory));
}

}  // namespace

void Coverage::Start() {
  if (counts.empty()) {
    counts.resize(static_cast<size_t>(&etext - &__executable_start));
    seen.resize(counts.size());
    touched.reserve(kBlocks);
  }
  compared = 0;
  watched = true;
}

bool Coverage::Stop() {
  watched = false;
  bool news = false;
  for (const size_t at : touched) {
    const uint8_t bucket = Bucket(counts[at]);
    if ((seen[at] & bucket) == 0) {
      covered += seen[at] == 0;
      seen[at] |= bucket;
      news = true;
    }
    counts[at] = 0;
  }
  touched.clear();
  return news;
}

size_t Coverage::blocks() { return covered; }

std::vector<Comparison> Coverage::Comparisons() {
  return std::vector<Comparison>(comparisons, comparisons + std::min(compared, kKept));
}

void Memory::Watch() { __sanitizer_install_malloc_and_free_hooks(OnMalloc, OnFree); }

void Memory::ResetPeak() {
  held_before = held.load();
  most = held.load();
}

size_t Memory::peak() { return static_cast<size_t>(most - held_before); }

namespace {

void Came(const void* address) {
  if (!watched) return;
  const auto at = static_cast<size_t>(static_cast<const char*>(address) - &__executable_start);
  if (at >= counts.size()) return;
  if (counts[at] == 0) {
    if (touched.size() == kBlocks) return;
    touched.push_back(at);
  }
  if (counts[at] < 255) ++counts[at];
}

void Switched(uint64_t value, const uint64_t* cases) {
  // The number of cases, the bits of the value, the cases.
  for (uint64_t i = 0; i < cases[0]; ++i) Compared(value, cases[2 + i], cases[1] / 8);
}

template <typename Float, typename Bits>
void ComparedFloats(Float a, Float b) {
  Bits x, y;
  std::memcpy(&x, &a, sizeof(x));
  std::memcpy(&y, &b, sizeof(y));
  Compared(x, y, sizeof(x));
}

}  // namespace
}  // namespace gmeta::fuzz

extern "C" {
void __sanitizer_cov_trace_pc() { gmeta::fuzz::Came(__builtin_return_address(0)); }
void __sanitizer_cov_trace_cmp1(uint8_t a, uint8_t b) { gmeta::fuzz::Compared(a, b, 1); }
void __sanitizer_cov_trace_cmp2(uint16_t a, uint16_t b) { gmeta::fuzz::Compared(a, b, 2); }
void __sanitizer_cov_trace_cmp4(uint32_t a, uint32_t b) { gmeta::fuzz::Compared(a, b, 4); }
void __sanitizer_cov_trace_cmp8(uint64_t a, uint64_t b) { gmeta::fuzz::Compared(a, b, 8); }
void __sanitizer_cov_trace_const_cmp1(uint8_t a, uint8_t b) { gmeta::fuzz::Compared(a, b, 1); }
void __sanitizer_cov_trace_const_cmp2(uint16_t a, uint16_t b) { gmeta::fuzz::Compared(a, b, 2); }
void __sanitizer_cov_trace_const_cmp4(uint32_t a, uint32_t b) { gmeta::fuzz::Compared(a, b, 4); }
void __sanitizer_cov_trace_const_cmp8(uint64_t a, uint64_t b) { gmeta::fuzz::Compared(a, b, 8); }
void __sanitizer_cov_trace_cmpf(float a, float b) {
  gmeta::fuzz::ComparedFloats<float, uint32_t>(a, b);
}
void __sanitizer_cov_trace_cmpd(double a, double b) {
  gmeta::fuzz::ComparedFloats<double, uint64_t>(a, b);
}
void __sanitizer_cov_trace_switch(uint64_t value, const uint64_t* cases) {
  gmeta::fuzz::Switched(value, cases);
}
}
