// Memory of a GPU table, in pieces that are freed once nothing refers to them.

#ifndef GMETA_OPS_TABLE_GPU_MEMORY_DEVICE_MEMORY_CUH_
#define GMETA_OPS_TABLE_GPU_MEMORY_DEVICE_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/table/gpu/memory/pinned_memory.cuh"
#include "ops/table/gpu/table_abi.h"

namespace gmeta {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Allocates memory from the allocator, or by cudaMalloc if the allocator has no functions.
  DeviceMemory(const gmeta_gpu_allocator& allocator, size_t bytes)
      : allocator_(allocator), bytes_(bytes) {
    if (bytes == 0) return;
    if (allocator.allocate != nullptr) {
      data_ = allocator.allocate(allocator.context, bytes);
    } else if (cudaMalloc(&data_, bytes) != cudaSuccess) {
      cudaGetLastError();  // clears the error, so that the next call doesn't report it
      data_ = nullptr;
    }
    if (data_ != nullptr) {
      // A framework's allocator may reuse memory whose last use is still queued on the framework's
      // stream, but a table also works on a stream of its own.
      if (allocator.allocate != nullptr) {
        CheckCuda(cudaDeviceSynchronize(), "waiting for the last use of memory");
      }
      return;
    }
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw CudaError(GMETA_CUDA_OUT_OF_MEMORY,
                    "the GPU lacks " + std::to_string(bytes) + " bytes for a table (" +
                        std::to_string(free) + " of " + std::to_string(total) +
                        " are free): bound the table by an eviction policy, or keep a bounded "
                        "number of its rows there and the others in host memory "
                        "(Tiers(hbm_rows=...))");
  }
  // Allocates host memory that kernels can read and write.
  static DeviceMemory Pinned(size_t bytes) {
    DeviceMemory memory;
    memory.pinned_ = PinnedMemory(bytes);
    memory.data_ = memory.pinned_.device();
    memory.bytes_ = bytes;
    return memory;
  }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(data_, other.data_);
    std::swap(pinned_, other.pinned_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory() {
    if (data_ == nullptr || host() != nullptr) return;
    if (allocator_.release != nullptr) {
      allocator_.release(allocator_.context, data_, bytes_);
    } else {
      cudaFree(data_);
    }
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // The same memory as the host sees it; null if it can't.
  char* host() const { return pinned_.host(); }
  size_t bytes() const { return bytes_; }

 private:
  gmeta_gpu_allocator allocator_{};
  void* data_ = nullptr;
  PinnedMemory pinned_;
  size_t bytes_ = 0;
};

// Makes a table's device the current one for the lifetime of this object.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    CheckCuda(cudaGetDevice(&before_), "finding the current GPU");
    if (before_ != device) CheckCuda(cudaSetDevice(device), "choosing the table's GPU");
    device_ = device;
  }
  ~DeviceScope() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  int device_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_MEMORY_DEVICE_MEMORY_CUH_
