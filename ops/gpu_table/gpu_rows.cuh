// The records of a GPU table by row number: memory that never moves, a directory, and a pool of row
// numbers that are free.
//
// Layout
//   Rows are in blocks of 2^k, a directory has a pointer to each:
//
//     block: 2^k x [weights, slots, padding]   then   2^k x [frequency, last step]
//
//   The record is row_record.h's, but its 8-byte header stands apart. So weights begin on a border
//   of 16 bytes (of 32, the unit of memory access, where the widths allow it): a row of 64 floats
//   is 8 sectors and not 9, and is read 16 bytes a lane. And passes that judge rows by their
//   metadata (incremental saves, eviction) read 8 bytes a row, densely. A lookup that inserts
//   touches one sector more than if the header stood with the weights. Headers of neighbouring rows
//   are 1/32 of a block apart: rows that are used most are made first, one after another, and
//   additions to one line of the cache take turns.
//
//   A block is about 4 MB, so the directory of 100 M rows is some 50 KB and stays in the first
//   cache. Blocks are cut from chunks, larger allocations; those beyond a number of rows may be in
//   pinned host memory, which kernels read and write over the bus like their own.
//
// The pool is a ring of the free rows' numbers. `taken` and `given` count for ever: number i that
// is taken is ring[i % capacity]. Taking for a warp is one atomic addition. Nothing is given while
// rows are taken, because kernels that erase and kernels that insert run one after another.

#ifndef GMETA_OPS_GPU_TABLE_GPU_ROWS_CUH_
#define GMETA_OPS_GPU_TABLE_GPU_ROWS_CUH_

#include <cstdint>

#include "ops/hash_table/row_record.h"

namespace gmeta {

// What is counted on the GPU: statistics.h's, and the pool's state.
struct GpuCounters {
  unsigned long long hits, misses, inserts, removes, updates, ignored, rejects;
  unsigned long long taken, given;  // of the pool
  unsigned int missing[2];          // keys that a lookup has left to its inserting half, by turns
  unsigned int selected;            // rows that a scan has found
  unsigned int shards_met[2];       // bits of shards
};

// What kernels see of the rows.
struct RowsView {
  char* const* blocks;
  uint32_t log2_block_rows;
  uint32_t stride;  // floats from a row to the next
  uint32_t dim;
  uint32_t slot_floats;
  uint32_t* ring;
  uint32_t capacity;
  GpuCounters* counters;

  __device__ float* weights(uint32_t row) const {
    return reinterpret_cast<float*>(block(row)) + static_cast<size_t>(in_block(row)) * stride;
  }
  __device__ RowHeader* header(uint32_t row) const {
    const size_t block_rows = size_t{1} << log2_block_rows;
    const uint32_t at = in_block(row);
    return reinterpret_cast<RowHeader*>(block(row) + block_rows * stride * sizeof(float)) +
           ((at % 32 << (log2_block_rows - 5)) | at / 32);
  }

  // The number that is taken as number `turn`.
  __device__ uint32_t Taken(unsigned long long turn) const { return ring[turn % capacity]; }
  __device__ void Give(uint32_t row) const {
    ring[atomicAdd(&counters->given, 1ull) % capacity] = row;
  }

 private:
  __device__ char* block(uint32_t row) const {
    return reinterpret_cast<char*>(
        __ldg(reinterpret_cast<const unsigned long long*>(blocks) + (row >> log2_block_rows)));
  }
  __device__ uint32_t in_block(uint32_t row) const { return row & ((1u << log2_block_rows) - 1); }
};

// Notes uses of a row that other threads may use as well. In two steps, so that the first one's way
// to memory is spent on other work.
class SharedTouch {
 public:
  __device__ void Begin(RowHeader* header, uint32_t step, uint32_t uses) {
    header_ = header;
    uses_ = uses;
    header->last_step = step;
    before_ = atomicAdd(&header->frequency, uses);
  }
  // The frequency stays at its largest. Between a sum that went beyond it and this, others may add
  // to what is too little; this comes after them.
  __device__ void End() const {
    if (header_ != nullptr && before_ > UINT32_MAX - uses_) {
      atomicExch(&header_->frequency, UINT32_MAX);
    }
  }

 private:
  RowHeader* header_ = nullptr;
  uint32_t uses_ = 0;
  uint32_t before_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_GPU_TABLE_GPU_ROWS_CUH_
