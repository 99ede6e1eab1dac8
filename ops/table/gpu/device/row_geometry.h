// How the records of a GPU table lie in its memory (rows.cuh): widths and sizes of blocks.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_ROW_GEOMETRY_H_
#define GMETA_OPS_TABLE_GPU_DEVICE_ROW_GEOMETRY_H_

#include <cstddef>
#include <cstdint>

#include "ops/table/core/row_record.h"

namespace gmeta {

struct RowGeometry {
  uint32_t stride;           // words of four bytes from a row to the next
  uint32_t log2_block_rows;  // at least 5

  // Records of float32, and half records. Where the width of a row is a multiple of four, so is the
  // record's, padded: its numbers are read four at a time in either form.
  static RowGeometry OfFull(const RowLayout& layout) { return OfStride(Numbers(layout)); }
  static RowGeometry OfHalf(const RowLayout& layout) { return OfStride((Numbers(layout) + 1) / 2); }

  uint64_t block_rows() const { return uint64_t{1} << log2_block_rows; }
  size_t block_bytes() const {
    const size_t bytes = block_rows() * (stride * sizeof(uint32_t) + sizeof(RowHeader));
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  static constexpr size_t kMostBytes = size_t{4} << 20;  // of a block, but where 32 rows take more
  static constexpr size_t kAlignment = 256;

  static size_t Numbers(const RowLayout& layout) {
    const size_t numbers = layout.dim() + layout.slot_floats();
    return layout.dim() % 4 == 0 ? (numbers + 3) / 4 * 4 : numbers;
  }
  static RowGeometry OfStride(size_t stride) {
    uint32_t log2 = 5;
    while ((size_t{2} << log2) * (stride * sizeof(uint32_t) + sizeof(RowHeader)) <= kMostBytes) {
      ++log2;
    }
    return {static_cast<uint32_t>(stride), log2};
  }
};

// How many of `added` blocks are to be in the GPU's memory, where a table may keep `device_rows`
// rows of a form there (0: all) and has memory for `capacity` of them, somewhere.
inline uint64_t BlocksOnDevice(uint64_t added, uint64_t block_rows, uint64_t capacity,
                               uint64_t device_rows) {
  if (device_rows == 0) return added;
  const uint64_t left = device_rows > capacity ? device_rows - capacity : 0;
  const uint64_t blocks = (left + block_rows - 1) / block_rows;
  return added < blocks ? added : blocks;
}

// How many full rows, where there are half ones beside them, may be in the GPU's memory for all
// rows to take what `device_rows` full ones would: half the memory is theirs, whichever come first,
// since they are the ones that are used; the other half holds as many half rows as were asked for.
inline uint64_t FullRowsOnDevice(uint64_t device_rows) { return (device_rows + 1) / 2; }

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_ROW_GEOMETRY_H_
