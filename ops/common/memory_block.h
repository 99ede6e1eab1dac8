// A zeroed, aligned block of memory, from which large tables are made.
//
// Blocks of 2 MiB and more are mapped from the system. They cost nothing until they are touched,
// are zero without a memset, return to the system when freed, and request huge pages. Random access
// to gigabytes of rows is bound by address translation as much as by the cache misses themselves;
// huge pages remove most of that. Smaller blocks come from calloc.

#ifndef GMETA_OPS_COMMON_MEMORY_BLOCK_H_
#define GMETA_OPS_COMMON_MEMORY_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gmeta {

class MemoryBlock {
 public:
  static constexpr size_t kAlignment =
      128;  // two cache lines: the unit of the adjacent-line prefetcher
  static constexpr size_t kHugePage = size_t{2} << 20;

  MemoryBlock() = default;
  explicit MemoryBlock(size_t bytes) : bytes_(bytes) { Allocate(); }
  MemoryBlock(MemoryBlock&& other) noexcept { *this = std::move(other); }
  MemoryBlock& operator=(MemoryBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~MemoryBlock() {
#if defined(__linux__)
    if (mapped_ > 0) {
      munmap(base_, mapped_);
      return;
    }
#endif
    std::free(base_);
  }

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Makes the system supply the memory now rather than at the first touch of each page, which may
  // cost more than all other work on a new row. The content stays. If the system can't do this
  // (Linux before 5.14), nothing happens.
  void Populate() const {
#if defined(__linux__)
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
    if (mapped_ > 0) madvise(data_, bytes_, kPopulateWrite);
#endif
  }

 private:
  void Allocate() {
    if (bytes_ == 0) return;
#if defined(__linux__)
    if (bytes_ >= kHugePage) {
      // One huge page more than requested, so that the block can start at a huge page's border.
      const size_t length = bytes_ + kHugePage;
      void* base =
          mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (base == MAP_FAILED) throw std::bad_alloc();
      base_ = base;
      mapped_ = length;
      data_ = AlignUp(base, kHugePage);
      madvise(data_, bytes_, MADV_HUGEPAGE);  // a hint: if it isn't granted, small pages serve
      return;
    }
#endif
    base_ = std::calloc(bytes_ + kAlignment, 1);
    if (base_ == nullptr) throw std::bad_alloc();
    data_ = AlignUp(base_, kAlignment);
  }

  static char* AlignUp(void* pointer, size_t alignment) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    return reinterpret_cast<char*>((address + alignment - 1) & ~(alignment - 1));
  }

  char* data_ = nullptr;
  void* base_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_ = 0;  // length of the mapping; 0: from calloc
};

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_MEMORY_BLOCK_H_
