#include <utility>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/row_store.cuh"

namespace gmeta {
namespace {

// Fills the ring of a larger pool, whose counts start again, with the free rows of the old pool and
// with `added` new rows from number `first` on.
__global__ void FillRing(const uint32_t* old_ring, uint32_t old_capacity, unsigned long long taken,
                         uint32_t left, uint32_t first, uint32_t added, uint32_t* ring) {
  const uint64_t i = GlobalThread();
  if (i < left) {
    ring[i] = old_ring[(taken + i) % old_capacity];
  } else if (i - left < added) {
    ring[i] = first + static_cast<uint32_t>(i - left);
  }
}

PoolCounters ReadPool(const PoolCounters* pool, cudaStream_t stream) {
  PoolCounters now;
  CheckCuda(cudaMemcpyAsync(&now, pool, sizeof now, cudaMemcpyDeviceToHost, stream),
            "reading a pool's state");
  CheckCuda(cudaStreamSynchronize(stream), "reading a pool's state");
  return now;
}

void WritePool(const PoolCounters& now, PoolCounters* pool, cudaStream_t stream) {
  CheckCuda(cudaMemcpyAsync(pool, &now, sizeof now, cudaMemcpyHostToDevice, stream),
            "writing a pool's state");
  CheckCuda(cudaStreamSynchronize(stream), "writing a pool's state");
}

}  // namespace

size_t GpuRowStore::bytes() const {
  size_t sum = blocks_.bytes() + ring_.bytes();
  for (const DeviceMemory& chunk : chunks_) sum += chunk.bytes();
  return sum;
}

void GpuRowStore::Grow(uint64_t rows, PoolCounters* pool, cudaStream_t stream) {
  if (rows <= capacity_) return;
  const uint64_t block_rows = geometry_.block_rows();
  const size_t block_bytes = geometry_.block_bytes();
  const uint64_t added = (rows - capacity_ + block_rows - 1) / block_rows;
  const uint64_t capacity = capacity_ + added * block_rows;
  Require(capacity <= most_rows_, owner_ + "it has no numbers for " + std::to_string(capacity) +
                                      " rows: bound it by an eviction");
  // Allocates all new memory before it changes anything, so that a lack of memory changes nothing.
  const uint64_t on_device = BlocksOnDevice(added, block_rows, capacity_, device_rows_);
  std::vector<DeviceMemory> chunks;
  if (on_device > 0) chunks.emplace_back(allocator_, on_device * block_bytes);
  if (added > on_device) {
    chunks.push_back(DeviceMemory::Pinned((added - on_device) * block_bytes));
  }
  std::vector<char*> directory(block_count_);
  if (block_count_ > 0) {
    CheckCuda(cudaMemcpyAsync(directory.data(), blocks_.as<void>(), block_count_ * sizeof(char*),
                              cudaMemcpyDeviceToHost, stream),
              "reading a directory");
    CheckCuda(cudaStreamSynchronize(stream), "reading a directory");
  }
  for (const DeviceMemory& chunk : chunks) {
    for (size_t at = 0; at < chunk.bytes(); at += block_bytes) {
      directory.push_back(chunk.as<char>() + at);
    }
  }
  DeviceMemory blocks(allocator_, directory.size() * sizeof(char*));
  DeviceMemory ring(allocator_, capacity * sizeof(uint32_t));
  const PoolCounters now = ReadPool(pool, stream);
  const uint64_t left = now.given - now.taken;
  const uint64_t fresh = added * block_rows;
  Launch(FillRing, BlocksOf(left + fresh), kBlockThreads, 0, stream, "filling a pool",
         ring_.as<uint32_t>(), static_cast<uint32_t>(capacity_), now.taken,
         static_cast<uint32_t>(left), static_cast<uint32_t>(capacity_),
         static_cast<uint32_t>(fresh), ring.as<uint32_t>());
  CheckCuda(cudaMemcpyAsync(blocks.as<void>(), directory.data(), directory.size() * sizeof(char*),
                            cudaMemcpyHostToDevice, stream),
            "writing a directory");
  WritePool({0, left + fresh}, pool, stream);
  for (DeviceMemory& chunk : chunks) chunks_.push_back(std::move(chunk));
  blocks_ = std::move(blocks);
  ring_ = std::move(ring);
  block_count_ = directory.size();
  capacity_ = capacity;
  NoteUsed({0, left + fresh});
}

void GpuRowStore::Clear(PoolCounters* pool, cudaStream_t stream) {
  if (capacity_ > 0) {
    Launch(FillRing, BlocksOf(capacity_), kBlockThreads, 0, stream, "filling a pool", nullptr, 1, 0,
           0, 0, static_cast<uint32_t>(capacity_), ring_.as<uint32_t>());
  }
  WritePool({0, capacity_}, pool, stream);
  NoteUsed({0, capacity_});
}

}  // namespace gmeta
