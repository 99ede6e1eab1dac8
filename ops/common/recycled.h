// Scratch memory that is reused. The allocator returns large blocks to the system when they are
// freed, and the system zeroes their pages again at the next use: for a pass over a batch that
// costs as much as half of the pass. So freed blocks are kept, by size, up to a bound for the whole
// process, and their pages stay.
//
// Sizes are rounded up to powers of two, so that batches of varying lengths can use each other's
// blocks; pages that are never touched cost nothing. Blocks below kSmallest are left to the
// allocator, which keeps those itself. Under the address sanitizer nothing is kept, so that it
// detects uses after a block was given back.

#ifndef GMETA_OPS_COMMON_RECYCLED_H_
#define GMETA_OPS_COMMON_RECYCLED_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

namespace gmeta {

class BlockCache {
 public:
  static constexpr size_t kSmallest = size_t{1} << 15;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kMostKept = 0;
#else
  static constexpr size_t kMostKept = size_t{1} << 27;
#endif

  // Returns the process's cache. It is never destroyed: threads may outlive static objects.
  static BlockCache& Get() {
    static BlockCache* const cache = new BlockCache;
    return *cache;
  }

  static size_t Rounded(size_t bytes) {
    if (bytes < kSmallest) return bytes;
    size_t rounded = kSmallest;
    while (rounded < bytes) rounded *= 2;
    return rounded;
  }

  // Returns a block of Rounded(bytes) bytes with arbitrary content.
  void* Take(size_t bytes) {
    const size_t size = Rounded(bytes);
    if (size >= kSmallest) {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<void*>& blocks = kept_[ClassOf(size)];
      if (!blocks.empty()) {
        void* block = blocks.back();
        blocks.pop_back();
        bytes_ -= size;
        return block;
      }
    }
    return ::operator new(size);
  }

  // Takes back a block of this many bytes.
  void Give(void* block, size_t bytes) {
    const size_t size = Rounded(bytes);
    if (size >= kSmallest) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (bytes_ + size <= kMostKept) {
        kept_[ClassOf(size)].push_back(block);
        bytes_ += size;
        return;
      }
    }
    ::operator delete(block);
  }

  size_t kept_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

 private:
  static size_t ClassOf(size_t size) { return static_cast<size_t>(__builtin_ctzll(size)); }

  std::mutex mutex_;
  std::vector<void*> kept_[64];  // by the logarithm of the blocks' size
  size_t bytes_ = 0;
};

struct GiveBack {
  size_t bytes = 0;
  void operator()(void* block) const { BlockCache::Get().Give(block, bytes); }
};

// An array of numbers or plain structs that are written before they are read.
template <class T>
using Recycled = std::unique_ptr<T[], GiveBack>;

template <class T>
Recycled<T> MakeRecycled(size_t n) {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  const size_t bytes = n * sizeof(T);
  return Recycled<T>(static_cast<T*>(BlockCache::Get().Take(bytes)), GiveBack{bytes});
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_RECYCLED_H_
