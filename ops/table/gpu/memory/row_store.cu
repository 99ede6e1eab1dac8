#include <utility>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/memory/row_store.cuh"

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
  size_t sum = blocks_.bytes() + marks_.bytes() + nowhere_.bytes();
  for (const Pool* pool : {&near_, &far_, &disk_}) sum += pool->ring.bytes();
  for (const DeviceMemory& chunk : chunks_) sum += chunk.bytes();
  return sum;
}

void GpuRowStore::AskAhead() {
  const uint64_t chunk = std::max(ChunkRows(), last_wish_);
  if (!GrowsFar() || capacity() - most_used() >= chunk) return;
  const uint64_t block_rows = geometry_.block_rows();
  const uint64_t blocks = (chunk + block_rows - 1) / block_rows;
  const uint64_t left = far_blocks_ - std::min(far_blocks_, far_.capacity / block_rows);
  spare_.Ask(std::min(blocks, left) * geometry_.records_bytes());
}

GpuRowStore::Addition GpuRowStore::Allocate(Pool* pool, uint64_t count, DeviceMemory pinned) {
  Addition added;
  if (count == 0) return added;
  added.count = count;
  const size_t records_bytes = geometry_.records_bytes(), headers_bytes = geometry_.headers_bytes();
  char *records = nullptr, *host_records = nullptr, *headers = nullptr;
  size_t step = records_bytes, headers_step = headers_bytes;
  if (pool == &near_) {
    step = headers_step = geometry_.block_bytes();
    records = added.chunks.emplace_back(allocator_, count * step).as<char>();
    headers = records + records_bytes;
  } else {
    if (pool == &disk_) {
      if (nowhere_.bytes() == 0) nowhere_ = DeviceMemory(allocator_, records_bytes);
      records = nowhere_.as<char>();
      step = 0;
    } else {
      if (pinned.bytes() == 0) pinned = DeviceMemory::Pinned(count * records_bytes);
      added.chunks.push_back(std::move(pinned));
      records = added.chunks.back().as<char>();
      host_records = added.chunks.back().host();
    }
    headers = added.chunks.emplace_back(allocator_, count * headers_bytes).as<char>();
  }
  for (uint64_t i = 0; i < count; ++i) {
    added.blocks.push_back(
        {pool,
         host_records == nullptr ? nullptr : host_records + i * step,
         {records + i * step, reinterpret_cast<RowHeader*>(headers + i * headers_step)}});
  }
  if (pool != nullptr) {
    const uint64_t capacity = pool->capacity + count * geometry_.block_rows();
    added.ring = DeviceMemory(allocator_, capacity * sizeof(uint32_t));
  }
  return added;
}

void GpuRowStore::Add(std::vector<Addition> additions, StorePools* pools, cudaStream_t stream) {
  const uint64_t block_rows = geometry_.block_rows();
  std::vector<BlockPlace> directory;
  for (const Block& block : blocks_on_host_) directory.push_back(block.place);
  bool marks_rows = marks_.bytes() > 0;
  for (const Addition& added : additions) {
    for (const Block& block : added.blocks) {
      directory.push_back(block.place);
      marks_rows = marks_rows || block.pool != &near_;
    }
  }
  const uint64_t numbers = directory.size() * block_rows;
  Require(numbers <= most_rows_, owner_ + "it has no numbers for " + std::to_string(numbers) +
                                     " rows: bound it by an eviction");
  DeviceMemory blocks(allocator_, directory.size() * sizeof(BlockPlace)), marks;
  CheckCuda(cudaMemcpyAsync(blocks.as<void>(), directory.data(), blocks.bytes(),
                            cudaMemcpyHostToDevice, stream),
            "writing a directory");
  if (marks_rows) {
    marks = DeviceMemory(allocator_, numbers * sizeof(uint32_t));
    CheckCuda(cudaMemsetAsync(marks.as<void>(), 0, marks.bytes(), stream), "clearing marks");
    if (marks_.bytes() > 0) {
      CheckCuda(cudaMemcpyAsync(marks.as<void>(), marks_.as<void>(), marks_.bytes(),
                                cudaMemcpyDeviceToDevice, stream),
                "copying marks");
    }
  }
  CheckCuda(cudaStreamSynchronize(stream), "growing a store");
  for (Addition& added : additions) {
    if (added.count == 0) continue;
    Pool* const pool = added.blocks.front().pool;
    if (pool != nullptr) {
      GrowPool(pool, CountersOf(pool, pools), blocks_on_host_.size() * block_rows,
               added.count * block_rows, std::move(added.ring), stream);
    }
    for (const Block& block : added.blocks) blocks_on_host_.push_back(block);
    for (DeviceMemory& chunk : added.chunks) chunks_.push_back(std::move(chunk));
  }
  blocks_ = std::move(blocks);
  marks_ = std::move(marks);
}

void GpuRowStore::Grow(uint64_t rows, StorePools* pools, cudaStream_t stream) {
  if (rows <= capacity()) return;
  const uint64_t block_rows = geometry_.block_rows();
  const uint64_t added = (rows - capacity() + block_rows - 1) / block_rows;
  const uint64_t near = NearBlocks(added, block_rows, near_.capacity, near_rows_);
  uint64_t far = added - near;
  // Allocates all new memory before it changes anything, so that a lack of memory changes nothing.
  std::vector<Addition> additions;
  additions.push_back(Allocate(&near_, near));
  DeviceMemory spare;
  if (far > 0) spare = spare_.Take(far * geometry_.records_bytes());
  if (spare.bytes() > 0) far = spare.bytes() / geometry_.records_bytes();
  additions.push_back(Allocate(&far_, far, std::move(spare)));
  Add(std::move(additions), pools, stream);
}

void GpuRowStore::GrowDisk(uint64_t rows, StorePools* pools, cudaStream_t stream) {
  std::vector<Addition> additions;
  const uint64_t block_rows = geometry_.block_rows();
  additions.push_back(Allocate(&disk_, (rows + block_rows - 1) / block_rows));
  Add(std::move(additions), pools, stream);
}

uint32_t GpuRowStore::AddStaging(uint64_t rows, cudaStream_t stream) {
  const uint64_t block_rows = geometry_.block_rows(), first = blocks_on_host_.size() * block_rows;
  std::vector<Addition> additions;
  additions.push_back(Allocate(nullptr, (rows + block_rows - 1) / block_rows));
  Add(std::move(additions), nullptr, stream);
  return static_cast<uint32_t>(first);
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
  const uint64_t block_rows = geometry_.block_rows();
  for (Pool* const pool : {&near_, &far_, &disk_}) {
    uint64_t filled = 0;
    for (size_t i = 0; i < blocks_on_host_.size();) {
      size_t end = i + 1;
      while (end < blocks_on_host_.size() && blocks_on_host_[end].pool == blocks_on_host_[i].pool) {
        ++end;
      }
      if (blocks_on_host_[i].pool == pool) {
        const auto rows = static_cast<uint32_t>((end - i) * block_rows);
        Launch(FillRing, BlocksOf(rows), kBlockThreads, 0, stream, "filling a pool", nullptr, 1, 0,
               0, static_cast<uint32_t>(i * block_rows), rows, pool->ring.as<uint32_t>() + filled);
        filled += rows;
      }
      i = end;
    }
    WritePool({0, pool->capacity, pool->capacity}, CountersOf(pool, pools), stream);
    pool->most_used = 0;
  }
  if (marks_.bytes() > 0) {
    CheckCuda(cudaMemsetAsync(marks_.as<void>(), 0, marks_.bytes(), stream), "clearing marks");
  }
}

}  // namespace gmeta
