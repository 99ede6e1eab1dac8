// Groups of a warp's lanes, which all of them meet together.

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_COOPERATIVE_GROUPS_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_COOPERATIVE_GROUPS_H_

#include <cuda_runtime.h>

namespace cooperative_groups {

struct thread_block {};
inline thread_block this_thread_block() { return {}; }

template <unsigned kSize>
class thread_block_tile {
 public:
  unsigned thread_rank() const { return lane() % kSize; }
  unsigned meta_group_rank() const { return lane() / kSize; }
  template <class T>
  T shfl(T x, unsigned rank) const {
    return ShuffledFrom(x, static_cast<int>(lane() / kSize * kSize + rank % kSize));
  }
  unsigned ballot(int x) const {
    return static_cast<unsigned>(__ballot_sync(0xffffffffu, x) >> lane() / kSize * kSize &
                                 ((uint64_t{1} << kSize) - 1));
  }

 private:
  static unsigned lane() { return static_cast<unsigned>(emulated::Current().lane()); }
};

template <unsigned kSize, class Group>
thread_block_tile<kSize> tiled_partition(const Group&) {
  return {};
}

}  // namespace cooperative_groups

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_COOPERATIVE_GROUPS_H_
