// Prefetches cache lines.
//
// GCC sees no effect in a function that only prefetches, and drops calls to it unless it was
// inlined first; it drops a loop that only prefetches, too. The empty volatile asm is an effect
// that costs no instruction, so the prefetches stay.

#ifndef GMETA_OPS_COMMON_PREFETCH_H_
#define GMETA_OPS_COMMON_PREFETCH_H_

#include <algorithm>
#include <cstddef>

namespace gmeta {

enum class Intent { kRead, kWrite };

// Prefetches the line of `address`.
template <Intent kIntent = Intent::kRead>
inline void Prefetch(const void* address) {
  asm volatile("");
  __builtin_prefetch(address, kIntent == Intent::kWrite);
}

// Prefetches the lines of [start, start + size), up to a kilobyte: beyond that the hardware's
// streamer has caught on, and more requests would only fill the line buffers.
template <Intent kIntent>
inline void PrefetchBytes(const void* start, size_t size) {
  constexpr size_t kLine = 64;
  const char* line = static_cast<const char*>(start);
  const char* last = line + std::min(size, 16 * kLine) - 1;
  for (; line < last; line += kLine) Prefetch<kIntent>(line);
  Prefetch<kIntent>(last);  // the range may end in one line more
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_PREFETCH_H_
