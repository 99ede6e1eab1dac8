// SpareChunk: pinned host memory for a store's next growth, which a thread allocates ahead.
//
// A store requests it when fewer rows are free than its next chunk has, and takes the chunk when it
// grows. If the chunk isn't there yet, taking it waits; if there was no memory for it, the store
// allocates what it needs itself, and its error says so.

#ifndef GMETA_OPS_TABLE_GPU_MEMORY_SPARE_CHUNK_CUH_
#define GMETA_OPS_TABLE_GPU_MEMORY_SPARE_CHUNK_CUH_

#include <cstddef>
#include <future>
#include <utility>

#include "ops/table/gpu/memory/device_memory.cuh"

namespace gmeta {

class SpareChunk {
 public:
  // Starts a thread that allocates this many bytes on the current device, unless there is a chunk.
  void Ask(size_t bytes) {
    if (chunk_.valid() || bytes == 0) return;
    int device = 0;
    CheckCuda(cudaGetDevice(&device), "finding the current GPU");
    chunk_ = std::async(std::launch::async, [device, bytes] {
      try {
        CheckCuda(cudaSetDevice(device), "choosing the table's GPU");
        return DeviceMemory::Pinned(bytes);
      } catch (const CudaError&) {
        return DeviceMemory();
      }
    });
  }
  // Returns the chunk if it has at least this many bytes, else empty memory. Then there is no
  // chunk.
  DeviceMemory Take(size_t bytes) {
    if (!chunk_.valid()) return {};
    DeviceMemory chunk = chunk_.get();
    return chunk.bytes() >= bytes ? std::move(chunk) : DeviceMemory();
  }

 private:
  std::future<DeviceMemory> chunk_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_MEMORY_SPARE_CHUNK_CUH_
