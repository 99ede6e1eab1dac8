// GpuRowStore: the memory of a table's rows of one form, and the host's upper bound of how many are
// in use. Kernels see it as a RowsView (rows.cuh), which describes the layout.
//
// Memory for rows is added in chunks, and no record ever moves: growth makes a larger directory and
// a larger ring. The pool's counts are part of the table's GpuCounters, in device memory, so the
// host knows only an upper bound, which the table keeps (table.cuh, "Waiting").

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
  // `owner` is for messages. `most_rows` is how many row numbers there are. `device_rows` is how
  // many rows may be in the GPU's memory (0: all); the others are in host memory.
  GpuRowStore(const std::string& owner, const gmeta_gpu_allocator& allocator,
              const RowGeometry& geometry, uint64_t most_rows, uint64_t device_rows)
      : owner_(owner),
        allocator_(allocator),
        geometry_(geometry),
        most_rows_(most_rows),
        device_rows_(device_rows) {}

  uint64_t capacity() const { return capacity_; }  // rows that there is memory for
  const RowGeometry& geometry() const { return geometry_; }
  size_t bytes() const;

  // `pool` and `counters` are the table's.
  RowsView View(size_t dim, size_t slot_floats, PoolCounters* pool, GpuCounters* counters) const {
    return {blocks_.as<char*>(),
            geometry_.log2_block_rows,
            geometry_.stride,
            static_cast<uint32_t>(dim),
            static_cast<uint32_t>(slot_floats),
            ring_.as<uint32_t>(),
            static_cast<uint32_t>(capacity_),
            pool,
            counters};
  }

  // Makes memory for `rows` rows in total. Waits for the stream if the store has less.
  void Grow(uint64_t rows, PoolCounters* pool, cudaStream_t stream);
  // Frees all rows.
  void Clear(PoolCounters* pool, cudaStream_t stream);

  // An upper bound of the number of rows in use.
  uint64_t most_used() const { return most_used_; }
  bool HasRoom(uint64_t rows) const { return most_used_ + rows <= capacity_; }
  void MayHaveTaken(uint64_t rows) { most_used_ = std::min(most_used_ + rows, capacity_); }
  // Sets the bound to the number of rows in use according to the pool's counts, and returns it.
  uint64_t NoteUsed(const PoolCounters& pool) {
    return most_used_ = capacity_ - (pool.given - pool.taken);
  }

 private:
  const std::string owner_;
  const gmeta_gpu_allocator allocator_;
  const RowGeometry geometry_;
  const uint64_t most_rows_;
  const uint64_t device_rows_;
  std::vector<DeviceMemory> chunks_;
  DeviceMemory blocks_;  // the directory
  uint64_t block_count_ = 0;
  uint64_t capacity_ = 0;
  DeviceMemory ring_;
  uint64_t most_used_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_ROW_STORE_CUH_
