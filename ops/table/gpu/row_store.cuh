// GpuRowStore: the memory of a table's rows of one form, and the host's upper bounds of how many
// are in use. Kernels see it as a RowsView (rows.cuh), which describes the layout.
//
// Memory for rows is added in chunks, and no row number ever means another place: growth makes a
// larger directory and larger rings. If the table bounds its rows in GPU memory, that memory comes
// first, and all later chunks are in pinned host memory. The pools' counts are part of the table's
// GpuCounters, in GPU memory, so the host knows only upper bounds, which the table keeps
// (table.cuh, "Waiting").

#ifndef GMETA_OPS_TABLE_GPU_ROW_STORE_CUH_
#define GMETA_OPS_TABLE_GPU_ROW_STORE_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/table/gpu/device/row_geometry.h"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/device_memory.cuh"

namespace gmeta {

class GpuRowStore {
 public:
  // `owner` is for messages. `most_rows` is how many row numbers there are. `near_rows` is how many
  // rows may be in GPU memory (0: all); the others are in host memory.
  GpuRowStore(const std::string& owner, const gmeta_gpu_allocator& allocator,
              const RowGeometry& geometry, uint64_t most_rows, uint64_t near_rows)
      : owner_(owner),
        allocator_(allocator),
        geometry_(geometry),
        most_rows_(most_rows),
        near_rows_(near_rows) {}

  // Rows that there is memory for.
  uint64_t capacity() const { return near_.capacity + far_.capacity; }
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
            static_cast<uint32_t>(near_.capacity),
            marks_.as<uint32_t>(),
            counters};
  }

  // The rows to make memory for when it lacks `rows`: room for two batches, so that the true number
  // of rows is known before the next growth. If GPU memory and host memory share what is added, a
  // second growth may have to follow. A large store grows by kMostChunkBytes, because an allocation
  // takes time in proportion.
  uint64_t Wish(uint64_t rows) const {
    const uint64_t most = kMostChunkBytes / geometry_.block_bytes() * geometry_.block_rows();
    const uint64_t chunk = std::min(capacity() / 8, most);
    return std::max(most_used() + 2 * rows, capacity() + std::max(rows, chunk));
  }
  // Makes memory for `rows` rows in total. Waits for the stream if the store has less. No rows may
  // be on their way (RowMoves).
  void Grow(uint64_t rows, StorePools* pools, cudaStream_t stream);
  // Frees all rows.
  void Clear(StorePools* pools, cudaStream_t stream);

  // An upper bound of the number of rows in use.
  uint64_t most_used() const { return near_.most_used + far_.most_used; }
  // Whether surely one of the pools has so many rows.
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
    return most_used() - pools.moving;
  }
  // The number of rows in host memory.
  uint64_t FarRows(const StorePools& pools) const {
    return far_.capacity - pools.far.free() - pools.leaving;
  }

 private:
  static constexpr size_t kMostChunkBytes = size_t{512} << 20;

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

  // Makes the pool's ring larger, by `added` rows from number `first` on.
  void GrowPool(Pool* pool, PoolCounters* counters, uint64_t first, uint64_t added,
                DeviceMemory ring, cudaStream_t stream);

  const std::string owner_;
  const gmeta_gpu_allocator allocator_;
  const RowGeometry geometry_;
  const uint64_t most_rows_;
  const uint64_t near_rows_;
  std::vector<DeviceMemory> chunks_;
  DeviceMemory blocks_;  // the directory
  uint64_t block_count_ = 0;
  Pool near_, far_;
  DeviceMemory marks_;  // of all rows, if there are far ones
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_ROW_STORE_CUH_
