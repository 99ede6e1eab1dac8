// RowStore: fixed-size records that never move, addressed by a 32-bit row number.
//
// Two levels:
//   ChunkArena, one per table, thread-safe. It owns the chunks, large pieces of memory whose size
//     grows with the table (so that there are few chunks and little memory is unused), and cuts
//     them into blocks of 32 rows. When the current chunk is half used, the arena allocates the
//     next one in advance; memory is touched only when a row is written, so allocating in advance
//     costs address space, not memory.
//   RowStore, one per shard, guarded by the shard's lock. It maps row number -> block (a directory
//     of pointers, a quarter of a byte per row, so that it stays in the nearest caches) -> record,
//     and keeps a list of freed rows, which are reused before new ones are made. The freed records
//     themselves hold the list.
//
// A shard wastes at most one block, the table at most half of its newest chunk; growth copies no
// record.

#ifndef GMETA_OPS_TABLE_HOST_ROW_STORE_H_
#define GMETA_OPS_TABLE_HOST_ROW_STORE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ops/common/memory_block.h"

namespace gmeta {

class ChunkArena {
 public:
  static constexpr size_t kBlockRows = 32;

  explicit ChunkArena(size_t record_bytes) : block_bytes_(kBlockRows * record_bytes) {}

  // Returns memory for kBlockRows records, which lives as long as the arena.
  char* AllocateBlock() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (used_ + block_bytes_ > current_bytes_) Advance();
    char* block = chunks_.back().data() + used_;
    used_ += block_bytes_;
    if (next_.bytes() == 0 && 2 * used_ > current_bytes_) next_ = MemoryBlock(NextBytes());
    return block;
  }

  // Allocates and populates memory for `rows` more rows at once, before they are needed.
  void Reserve(size_t rows) {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t wanted = (rows + kBlockRows - 1) / kBlockRows * block_bytes_;
    const size_t left = current_bytes_ - used_ + next_.bytes();
    if (wanted <= left) return;
    next_ = MemoryBlock(wanted - (current_bytes_ - used_) / block_bytes_ * block_bytes_);
    next_.Populate();
    reserved_ = next_.bytes();
  }

  // Bytes of memory that the system has supplied: a reserved chunk counts whole, any other chunk
  // only as far as it is used, because untouched memory takes up addresses only.
  size_t bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return total_ + reserved_ - (populated_ ? 0 : current_bytes_ - used_);
  }

 private:
  static constexpr size_t kSmallest = size_t{64} << 10;
  static constexpr size_t kLargest = size_t{64} << 20;

  // The size of the next chunk: a sixteenth of the memory so far, so that memory grows with the
  // rows. From one huge page on, it is a 64th, in whole huge pages, since a part of a huge page
  // would consist of small pages: as many, up to twice that, as leave the least of them unused
  // past the last block.
  size_t NextBytes() const {
    const size_t share = std::min(total_ / 16, std::max(total_ / 64, MemoryBlock::kHugePage));
    const size_t wish = std::max(block_bytes_, std::clamp(share, kSmallest, kLargest));
    if (wish < MemoryBlock::kHugePage) return wish / block_bytes_ * block_bytes_;
    const size_t fewest = (wish + MemoryBlock::kHugePage - 1) / MemoryBlock::kHugePage;
    size_t best = fewest * MemoryBlock::kHugePage;
    for (size_t pages = fewest + 1; pages <= 2 * fewest; ++pages) {
      const size_t bytes = pages * MemoryBlock::kHugePage;
      if (bytes % block_bytes_ * best < best % block_bytes_ * bytes) best = bytes;
    }
    return best;
  }

  void Advance() {
    if (next_.bytes() == 0) next_ = MemoryBlock(NextBytes());
    current_bytes_ = next_.bytes();
    total_ += current_bytes_;
    populated_ = reserved_ > 0;
    reserved_ = 0;
    chunks_.push_back(std::exchange(next_, MemoryBlock()));
    used_ = 0;
  }

  mutable std::mutex mutex_;
  const size_t block_bytes_;
  std::vector<MemoryBlock> chunks_;  // the last one is the current one
  MemoryBlock next_;
  size_t current_bytes_ = 0;
  size_t used_ = 0;
  size_t total_ = 0;
  size_t reserved_ = 0;     // bytes of next_, if it was reserved
  bool populated_ = false;  // whether the current chunk was reserved
};

class RowStore {
 public:
  // The last block of 2^32 rows is never used, so that no row has the number kEnd.
  static constexpr uint64_t kMostRows = uint64_t{1} << 32;

  RowStore(size_t record_bytes, ChunkArena* arena, uint64_t most_rows = kMostRows)
      : record_bytes_(record_bytes),
        most_rows_(most_rows - ChunkArena::kBlockRows),
        arena_(arena) {}

  char* operator[](uint32_t row) const {
    return directory_[row / ChunkArena::kBlockRows] + row % ChunkArena::kBlockRows * record_bytes_;
  }

  // Returns a row whose record has arbitrary content. The caller writes all of it.
  uint32_t Allocate() {
    if (free_ != kEnd) {
      const uint32_t row = free_;
      std::memcpy(&free_, (*this)[row], sizeof free_);
      return row;
    }
    if (next_row_ == directory_.size() * ChunkArena::kBlockRows) {
      if (next_row_ == most_rows_) {
        throw std::length_error("a shard of a table is full: it has no numbers for more rows");
      }
      if (directory_.size() == directory_.capacity()) {
        directory_.reserve(directory_.size() * 5 / 4 + 1);  // by less than push_back would
      }
      directory_.push_back(arena_->AllocateBlock());
    }
    return static_cast<uint32_t>(next_row_++);
  }

  void Free(uint32_t row) {
    std::memcpy((*this)[row], &free_, sizeof free_);
    free_ = row;
  }

  // Frees all rows and keeps their memory for later rows.
  void Clear() {
    next_row_ = 0;
    free_ = kEnd;
  }

  size_t directory_bytes() const { return directory_.capacity() * sizeof(char*); }

 private:
  static constexpr uint32_t kEnd = UINT32_MAX;

  const size_t record_bytes_;
  const uint64_t most_rows_;
  ChunkArena* const arena_;
  std::vector<char*> directory_;
  uint64_t next_row_ = 0;
  uint32_t free_ = kEnd;  // the head of the list of freed rows
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_STORE_H_
