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
  size_t sum = blocks_.bytes() + near_.ring.bytes() + far_.ring.bytes() + marks_.bytes();
  for (const DeviceMemory& chunk : chunks_) sum += chunk.bytes();
  return sum;
}

void GpuRowStore::Grow(uint64_t rows, StorePools* pools, cudaStream_t stream) {
  const uint64_t before = capacity();
  if (rows <= before) return;
  const uint64_t block_rows = geometry_.block_rows();
  const size_t block_bytes = geometry_.block_bytes();
  const uint64_t added = (rows - before + block_rows - 1) / block_rows;
  const uint64_t after = before + added * block_rows;
  Require(after <= most_rows_, owner_ + "it has no numbers for " + std::to_string(after) +
                                   " rows: bound it by an eviction");
  // Allocates all new memory before it changes anything, so that a lack of memory changes nothing.
  const uint64_t near = NearBlocks(added, block_rows, before, near_rows_), far = added - near;
  std::vector<DeviceMemory> chunks;
  std::vector<BlockPlace> directory(block_count_);
  if (block_count_ > 0) {
    CheckCuda(cudaMemcpyAsync(directory.data(), blocks_.as<void>(),
                              block_count_ * sizeof(BlockPlace), cudaMemcpyDeviceToHost, stream),
              "reading a directory");
    CheckCuda(cudaStreamSynchronize(stream), "reading a directory");
  }
  const auto add = [&](char* records, char* headers) {
    directory.push_back({records, reinterpret_cast<RowHeader*>(headers)});
  };
  const size_t records_bytes = geometry_.records_bytes(), headers_bytes = geometry_.headers_bytes();
  DeviceMemory near_ring, far_ring, marks;
  if (near > 0) {
    char* const chunk = chunks.emplace_back(allocator_, near * block_bytes).as<char>();
    for (uint64_t i = 0; i < near; ++i) {
      add(chunk + i * block_bytes, chunk + i * block_bytes + records_bytes);
    }
    near_ring = DeviceMemory(allocator_, (near_.capacity + near * block_rows) * sizeof(uint32_t));
  }
  if (far > 0) {
    chunks.push_back(DeviceMemory::Pinned(far * records_bytes));
    char* const records = chunks.back().as<char>();
    char* const headers = chunks.emplace_back(allocator_, far * headers_bytes).as<char>();
    for (uint64_t i = 0; i < far; ++i)
      add(records + i * records_bytes, headers + i * headers_bytes);
    far_ring = DeviceMemory(allocator_, (far_.capacity + far * block_rows) * sizeof(uint32_t));
    marks = DeviceMemory(allocator_, after * sizeof(uint32_t));
  }
  DeviceMemory blocks(allocator_, directory.size() * sizeof(BlockPlace));
  CheckCuda(cudaMemcpyAsync(blocks.as<void>(), directory.data(), blocks.bytes(),
                            cudaMemcpyHostToDevice, stream),
            "writing a directory");
  if (far > 0) {
    CheckCuda(cudaMemsetAsync(marks.as<void>(), 0, marks.bytes(), stream), "clearing marks");
    if (marks_.bytes() > 0) {
      CheckCuda(cudaMemcpyAsync(marks.as<void>(), marks_.as<void>(), marks_.bytes(),
                                cudaMemcpyDeviceToDevice, stream),
                "copying marks");
    }
  }
  CheckCuda(cudaStreamSynchronize(stream), "growing a store");
  if (near > 0) {
    GrowPool(&near_, &pools->near, before, near * block_rows, std::move(near_ring), stream);
  }
  if (far > 0) {
    GrowPool(&far_, &pools->far, before + near * block_rows, far * block_rows, std::move(far_ring),
             stream);
    marks_ = std::move(marks);
  }
  for (DeviceMemory& chunk : chunks) chunks_.push_back(std::move(chunk));
  blocks_ = std::move(blocks);
  block_count_ = directory.size();
}

void GpuRowStore::GrowPool(Pool* pool, PoolCounters* counters, uint64_t first, uint64_t added,
                           DeviceMemory ring, cudaStream_t stream) {
  const PoolCounters now = ReadPool(counters, stream);
  const uint64_t left = now.free();
  Launch(FillRing, BlocksOf(left + added), kBlockThreads, 0, stream, "filling a pool",
         pool->ring.as<uint32_t>(), static_cast<uint32_t>(pool->capacity), now.taken,
         static_cast<uint32_t>(left), static_cast<uint32_t>(first), static_cast<uint32_t>(added),
         ring.as<uint32_t>());
  WritePool({0, left + added, left + added}, counters, stream);
  pool->ring = std::move(ring);
  pool->capacity += added;
  pool->most_used = pool->capacity - (left + added);
}

void GpuRowStore::Clear(StorePools* pools, cudaStream_t stream) {
  uint64_t first = 0;
  for (const auto& [pool, counters] :
       {std::make_pair(&near_, &pools->near), std::make_pair(&far_, &pools->far)}) {
    if (pool->capacity > 0) {
      Launch(FillRing, BlocksOf(pool->capacity), kBlockThreads, 0, stream, "filling a pool",
             nullptr, 1, 0, 0, static_cast<uint32_t>(first), static_cast<uint32_t>(pool->capacity),
             pool->ring.as<uint32_t>());
    }
    WritePool({0, pool->capacity, pool->capacity}, counters, stream);
    pool->most_used = 0;
    first += pool->capacity;
  }
  if (marks_.bytes() > 0) {
    CheckCuda(cudaMemsetAsync(marks_.as<void>(), 0, marks_.bytes(), stream), "clearing marks");
  }
}

}  // namespace gmeta
