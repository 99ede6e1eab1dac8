// The layout of a GPU table's records in its memory (rows.cuh): widths and sizes of blocks.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_ROW_GEOMETRY_H_
#define GMETA_OPS_TABLE_GPU_DEVICE_ROW_GEOMETRY_H_

#include <cstddef>
#include <cstdint>

#include "ops/table/core/row_record.h"

namespace gmeta {

struct RowGeometry {
  uint32_t stride;           // four-byte words from one row to the next
  uint32_t log2_block_rows;  // at least 5

  // The geometry of float32 records and of half records. If the width of a row is a multiple of
  // four, the record is padded so that its width is too: kernels read four of its numbers at a
  // time, in either form. Blocks have an eighth of `near_rows` rows at the most (0: any number), so
  // that about as many rows are in GPU memory.
  static RowGeometry OfFull(const RowLayout& layout, uint64_t near_rows) {
    return OfStride(Numbers(layout), near_rows);
  }
  static RowGeometry OfHalf(const RowLayout& layout, uint64_t near_rows) {
    return OfStride((Numbers(layout) + 1) / 2, near_rows);
  }

  uint64_t block_rows() const { return uint64_t{1} << log2_block_rows; }
  // The bytes of a block's records, of its headers, and of both.
  size_t records_bytes() const { return RoundUp(block_rows() * stride * sizeof(uint32_t)); }
  size_t headers_bytes() const { return RoundUp(block_rows() * sizeof(RowHeader)); }
  size_t block_bytes() const { return records_bytes() + headers_bytes(); }

 private:
  static constexpr size_t kMostBytes = size_t{4} << 20;  // of a block, unless 32 rows take more
  static constexpr size_t kAlignment = 256;

  static size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  static size_t Numbers(const RowLayout& layout) {
    const size_t numbers = layout.dim() + layout.slot_floats();
    return layout.dim() % 4 == 0 ? (numbers + 3) / 4 * 4 : numbers;
  }
  static RowGeometry OfStride(size_t stride, uint64_t near_rows) {
    uint32_t log2 = 5;
    while ((size_t{2} << log2) * (stride * sizeof(uint32_t) + sizeof(RowHeader)) <= kMostBytes &&
           (near_rows == 0 || (uint64_t{16} << log2) <= near_rows)) {
      ++log2;
    }
    return {static_cast<uint32_t>(stride), log2};
  }
};

// How many of `added` blocks are to be in GPU memory, of a table that keeps `near_rows` rows of a
// form there (0: all) and has memory for `capacity` rows of that form, wherever it is.
inline uint64_t NearBlocks(uint64_t added, uint64_t block_rows, uint64_t capacity,
                           uint64_t near_rows) {
  if (near_rows == 0) return added;
  const uint64_t left = near_rows > capacity ? near_rows - capacity : 0;
  const uint64_t blocks = (left + block_rows - 1) / block_rows;
  return added < blocks ? added : blocks;
}

// How many full rows may be in GPU memory if the table also has half rows and all rows there
// together are to take the memory of `near_rows` full rows. Half of this memory is for full rows,
// because full rows are the ones that are used. The other half holds `near_rows` half rows.
inline uint64_t NearFullRows(uint64_t near_rows) { return (near_rows + 1) / 2; }

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_ROW_GEOMETRY_H_
