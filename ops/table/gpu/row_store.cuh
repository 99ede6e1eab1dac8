// GpuRowStore: the memory of a table's rows of one form, and what the host knows of how many are in
// use. Kernels see it as a RowsView (rows.cuh), which says how it is laid out.
//
// Rows come in chunks, and no record ever moves: growth makes a larger directory and a larger ring.
// The pool's counts are part of the table's GpuCounters, in device memory; so what the host knows
// is an upper bound, which the table keeps (table.cuh, "Waiting").

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
  // `owner`: for messages. `most_rows`: how many numbers there are. `device_rows`: how many rows
  // may be in the GPU's memory, the others are in host memory; 0: all.
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

  // `pool` and `counters`: the table's.
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

  // Memory for `rows` rows in all. Waits for the stream if there isn't so much.
  void Grow(uint64_t rows, PoolCounters* pool, cudaStream_t stream);
  // All rows are free again.
  void Clear(PoolCounters* pool, cudaStream_t stream);

  // How many rows are in use at most.
  uint64_t most_used() const { return most_used_; }
  bool HasRoom(uint64_t rows) const { return most_used_ + rows <= capacity_; }
  void MayHaveTaken(uint64_t rows) { most_used_ = std::min(most_used_ + rows, capacity_); }
  // Returns how many rows are in use by the pool's counts.
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
