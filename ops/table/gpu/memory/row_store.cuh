// GpuRowStore: the memory of a table's rows of one form, and the host's upper bounds of how many
// are in use. Kernels see it as a RowsView (rows.cuh), which describes the layout.
//
// Memory for rows is added in chunks, and no row number ever means another place: growth makes a
// larger directory and larger rings. If the table bounds its rows in GPU memory, that memory comes
// first, and all later chunks are in pinned host memory. Rows on disk take memory for their headers
// only, and rows of the staging area are in no pool. The pools' counts are part of the table's
// GpuCounters, in GPU memory, so the host knows only upper bounds, which the table keeps
// (table.cuh, "Waiting"). While rows are in host memory, the next chunk of it is allocated ahead
// (spare_chunk.cuh), so that no batch waits until memory is pinned.

#ifndef GMETA_OPS_TABLE_GPU_MEMORY_ROW_STORE_CUH_
#define GMETA_OPS_TABLE_GPU_MEMORY_ROW_STORE_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/table/gpu/device/row_geometry.h"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/memory/device_memory.cuh"
#include "ops/table/gpu/memory/spare_chunk.cuh"

namespace gmeta {

class GpuRowStore {
 public:
  // `owner` is for messages. `most_rows` is how many row numbers there are. `near_rows` is how many
  // rows may be in GPU memory (0: all); the others are in host memory. `host_bytes` is how much of
  // it they take before rows go to disk (0: none go there).
  GpuRowStore(const std::string& owner, const gmeta_gpu_allocator& allocator,
              const RowGeometry& geometry, uint64_t most_rows, uint64_t near_rows,
              uint64_t host_bytes)
      : owner_(owner),
        allocator_(allocator),
        geometry_(geometry),
        most_rows_(most_rows),
        near_rows_(near_rows),
        far_blocks_(host_bytes == 0
                        ? UINT64_MAX
                        : std::max<uint64_t>(1, host_bytes / geometry.records_bytes())) {}

  // The number of rows that have memory.
  uint64_t capacity() const { return near_.capacity + far_.capacity; }
  // The number of rows that are to have memory, if others go to disk.
  uint64_t most_in_memory() const {
    if (far_blocks_ == UINT64_MAX) return UINT64_MAX;
    const uint64_t block = geometry_.block_rows();
    return ((near_rows_ + block - 1) / block + far_blocks_) * block;
  }
  bool has_far_rows() const { return far_.capacity > 0; }
  uint64_t near_capacity() const { return near_.capacity; }
  const RowGeometry& geometry() const { return geometry_; }
  size_t bytes() const;

  // `pools` and `counters` are the table's.
  RowsView View(size_t dim, size_t slot_floats, StorePools* pools, GpuCounters* counters) const {
    return {blocks_.as<BlockPlace>(),
            geometry_.log2_block_rows,
            geometry_.stride,
            static_cast<uint32_t>(dim),
            static_cast<uint32_t>(slot_floats),
            near_.View(&pools->near),
            far_.View(&pools->far),
            disk_.View(&pools->disk),
            static_cast<uint32_t>(near_.capacity),
            static_cast<uint32_t>(blocks_on_host_.size() * geometry_.block_rows()),
            marks_.as<uint32_t>(),
            nowhere_.as<char>(),
            counters};
  }

  // The rows to make memory for when it lacks `rows`: room for two batches, so that the true number
  // of rows is known before the next growth. If GPU memory and host memory share what is added, a
  // second growth may have to follow. A large store grows by a chunk of bounded size, because an
  // allocation takes time in proportion.
  uint64_t Wish(uint64_t rows) {
    const uint64_t wish =
        std::max(most_used() + 2 * rows, capacity() + std::max(rows, ChunkRows()));
    last_wish_ = wish - capacity();
    return wish;
  }
  // Makes memory for `rows` rows in total. Waits for the stream if the store has less. No rows may
  // be on their way (RowMoves).
  void Grow(uint64_t rows, StorePools* pools, cudaStream_t stream);
  // Makes at least this many more numbers for rows on disk, in the same way.
  void GrowDisk(uint64_t rows, StorePools* pools, cudaStream_t stream);
  // Makes a staging area of at least this many rows. Returns the number of its first row.
  uint32_t AddStaging(uint64_t rows, cudaStream_t stream);
  // The record of a row in host memory, as the host sees it.
  char* HostRecord(uint32_t row) const {
    return blocks_on_host_[row >> geometry_.log2_block_rows].host_records +
           (row & (geometry_.block_rows() - 1)) * geometry_.stride * sizeof(uint32_t);
  }
  size_t record_bytes() const { return geometry_.stride * sizeof(uint32_t); }
  const uint32_t* disk_ring() const { return disk_.ring.as<uint32_t>(); }
  uint64_t disk_capacity() const { return disk_.capacity; }
  // Frees all rows.
  void Clear(StorePools* pools, cudaStream_t stream);

  // An upper bound of the number of rows in use.
  uint64_t most_used() const { return near_.most_used + far_.most_used; }
  // Whether one of the pools is certain to have this many rows.
  bool HasRoom(uint64_t rows) const { return near_.HasRoom(rows) || HasFarRoom(rows); }
  bool HasFarRoom(uint64_t rows) const { return far_.HasRoom(rows); }
  void MayHaveTaken(uint64_t rows) {
    near_.MayHaveTaken(rows);
    far_.MayHaveTaken(rows);
  }
  // Sets the bounds to the numbers of rows in use according to the pools' counts. Returns the
  // number of rows, of which those on their way count once.
  uint64_t NoteUsed(const StorePools& pools) {
    near_.most_used = near_.capacity - pools.near.free();
    far_.most_used = far_.capacity - pools.far.free();
    AskAhead();
    return most_used() - pools.moving + DiskRows(pools);
  }
  uint64_t DiskRows(const StorePools& pools) const { return disk_.capacity - pools.disk.free(); }
  // The number of rows in host memory.
  uint64_t FarRows(const StorePools& pools) const {
    return far_.capacity - pools.far.free() - pools.leaving;
  }

 private:
  static constexpr size_t kMostChunkBytes = size_t{512} << 20;
  static constexpr size_t kMostPinnedBytes = PinnedMemory::kPiece;

  struct Pool {
    uint64_t capacity = 0;
    uint64_t most_used = 0;
    DeviceMemory ring;

    PoolView View(PoolCounters* counters) const {
      return {ring.as<uint32_t>(), static_cast<uint32_t>(capacity), counters};
    }
    bool HasRoom(uint64_t rows) const { return most_used + rows <= capacity; }
    void MayHaveTaken(uint64_t rows) { most_used = std::min(most_used + rows, capacity); }
  };

  // A block as the host sees it. `pool` is null for the staging area.
  struct Block {
    Pool* pool;
    char* host_records;
    BlockPlace place;
  };
  // Memory for `count` blocks of one kind, which are added together.
  struct Addition {
    uint64_t count = 0;
    std::vector<Block> blocks;
    std::vector<DeviceMemory> chunks;
    DeviceMemory ring;
  };

  // Whether GPU memory has all of its rows, so that more of them are in host memory.
  bool GrowsFar() const { return near_rows_ != 0 && near_.capacity >= near_rows_; }
  // How many rows a store grows by if no batch needs more.
  uint64_t ChunkRows() const {
    const size_t most = GrowsFar() ? kMostPinnedBytes / geometry_.records_bytes()
                                   : kMostChunkBytes / geometry_.block_bytes();
    return std::min(capacity() / 8, std::max<size_t>(1, most) * geometry_.block_rows());
  }
  // Requests the next chunk of host memory if growth is near.
  void AskAhead();
  // Allocates blocks in GPU memory, in host memory, or on disk. `pool` is null for the staging
  // area, which is in host memory. `pinned` is their host memory if it is there already.
  Addition Allocate(Pool* pool, uint64_t count, DeviceMemory pinned = {});
  // Adds blocks to the directory and their rows to the pools.
  void Add(std::vector<Addition> additions, StorePools* pools, cudaStream_t stream);
  // Makes the pool's ring larger, by `added` rows from number `first` on.
  void GrowPool(Pool* pool, PoolCounters* counters, uint64_t first, uint64_t added,
                DeviceMemory ring, cudaStream_t stream);
  PoolCounters* CountersOf(const Pool* pool, StorePools* pools) const {
    return pool == &near_ ? &pools->near : pool == &far_ ? &pools->far : &pools->disk;
  }

  const std::string owner_;
  const gmeta_gpu_allocator allocator_;
  const RowGeometry geometry_;
  const uint64_t most_rows_;
  const uint64_t near_rows_;
  const uint64_t far_blocks_;  // in host memory, before rows go to disk
  std::vector<DeviceMemory> chunks_;
  std::vector<Block> blocks_on_host_;
  DeviceMemory blocks_;  // the directory
  Pool near_, far_, disk_;
  DeviceMemory marks_;  // of all rows, if there are far ones
  SpareChunk spare_;
  uint64_t last_wish_ = 0;  // rows that a growth added
  DeviceMemory nowhere_;    // what kernels find in place of the records of a block on disk
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_MEMORY_ROW_STORE_CUH_
