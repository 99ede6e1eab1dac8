// PinnedMemory: host memory that kernels read and write, allocated without blocking the driver.
//
// cudaHostAlloc blocks the driver while the system clears pages. On an H100's host 512 MiB take
// 0.2 s, during which any call of any thread waits. So the memory is allocated by the system first,
// in huge pages where available, and a few threads clear it, which takes a tenth of that time and
// blocks no call. Then it is registered in pieces: a concurrent call waits for one of them, at most
// 2 ms. A piece is the most that one copy by the driver may touch; kernels don't know pieces.

#ifndef GMETA_OPS_TABLE_GPU_MEMORY_PINNED_MEMORY_CUH_
#define GMETA_OPS_TABLE_GPU_MEMORY_PINNED_MEMORY_CUH_

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/table/gpu/table_abi.h"

namespace gmeta {

class PinnedMemory {
 public:
  static constexpr size_t kPiece = size_t{64} << 20;

  PinnedMemory() = default;
  explicit PinnedMemory(size_t bytes) : bytes_(bytes) {
    void* const mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      throw CudaError(GMETA_CUDA_OUT_OF_MEMORY, "the host lacks " + std::to_string(bytes) +
                                                    " bytes for rows: bound the table by an "
                                                    "eviction policy, or move rows to a drive "
                                                    "(Tiers(host_bytes=..., ssd=...))");
    }
    data_ = static_cast<char*>(mapped);
    madvise(data_, bytes, MADV_HUGEPAGE);
    Clear();
    try {
      for (; registered_ < bytes; registered_ += kPiece) {
        CheckCuda(cudaHostRegister(data_ + registered_, std::min(kPiece, bytes - registered_),
                                   cudaHostRegisterPortable | cudaHostRegisterMapped),
                  "pinning host memory for rows");
      }
      CheckCuda(cudaHostGetDevicePointer(&on_device_, data_, 0), "mapping host memory");
    } catch (...) {
      Free();
      throw;
    }
  }
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(on_device_, other.on_device_);
    std::swap(bytes_, other.bytes_);
    std::swap(registered_, other.registered_);
    return *this;
  }
  ~PinnedMemory() { Free(); }

  char* host() const { return data_; }
  void* device() const { return on_device_; }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kThreads = 4;

  // Makes the system supply all pages, which it clears.
  void Clear() {
    const size_t share = std::max(kPiece / 16, (bytes_ / kThreads + kPage - 1) / kPage * kPage);
    const auto clear = [this](size_t begin, size_t end) {
      for (size_t at = begin; at < end; at += kPage) static_cast<volatile char*>(data_)[at] = 0;
    };
    std::vector<std::thread> threads;
    for (size_t begin = share; begin < bytes_; begin += share) {
      threads.emplace_back(clear, begin, std::min(bytes_, begin + share));
    }
    clear(0, std::min(bytes_, share));
    for (std::thread& thread : threads) thread.join();
  }
  void Free() {
    if (data_ == nullptr) return;
    for (size_t at = 0; at < registered_; at += kPiece) cudaHostUnregister(data_ + at);
    munmap(data_, bytes_);
    data_ = nullptr;
  }

  char* data_ = nullptr;
  void* on_device_ = nullptr;
  size_t bytes_ = 0;
  size_t registered_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_MEMORY_PINNED_MEMORY_CUH_
