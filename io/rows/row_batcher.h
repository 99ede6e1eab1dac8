// Shuffles rows of groups and cuts them into batches.
//
// A block is the rows of some neighbouring groups, column by column, in memory that the caller
// owns. The rows of a block are permuted among each other (Fisher and Yates, draws.h), and batches
// take them in that order. A batch starts where the last one ended, and covers as many blocks as it
// needs:
//
//     blocks (each in its own order)    3 1 0 2 | 1 0 | 2 0 1      rows per batch: 5
//     batches                           ^^^^^^^^^^^       ^ ^^^^^   the third has one row
//
// Blocks wait in a queue. For each block the queue keeps what it needs to draw the order again, and
// how many of its rows were taken. So a saved queue is the waiting blocks and two numbers each.
//
// Why it is fast: a column of a batch is written once, straight from the block to the batch.
// Nothing is permuted in between and no pieces are joined: a row of 21 columns costs 21 loads from
// a block that was made small enough for the cache, and 21 stores one after another. The order is 4
// bytes per row, shared by all columns.
//
// Columns are of three kinds: one value per row; a list per row, stored as values and row splits;
// or one value per group, such as the task's id, which a row finds by the number of its group.

#ifndef GMETA_IO_ROWS_ROW_BATCHER_H_
#define GMETA_IO_ROWS_ROW_BATCHER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include "io/group_batch/draws.h"

namespace gmeta::rows {

using group_batch::Draws;
using group_batch::Seed;

// The seed and the stream from which a block's order is drawn.
struct Shuffle {
  bool on = false;
  Seed seed;
  uint64_t stream = 0;
};

// Rows that wait. `owner` keeps the columns' memory alive; this code only hands it back.
template <typename Owner>
struct Block {
  Owner owner;
  std::vector<uint32_t> order;  // the rows, in the order in which batches take them
  std::vector<uint32_t> group;  // each row's group
  size_t taken = 0;             // how many of `order` earlier batches have taken
};

// Makes a block. `ends` has the place after each group's last row; less than 2^32 rows.
template <typename Owner>
Block<Owner> MakeBlock(Owner owner, const int64_t* ends, size_t groups, const Shuffle& shuffle) {
  Block<Owner> block{std::move(owner), {}, {}, 0};
  const size_t rows = groups > 0 ? static_cast<size_t>(ends[groups - 1]) : 0;
  block.order.resize(rows);
  std::iota(block.order.begin(), block.order.end(), 0u);
  if (shuffle.on) Permute(Draws(shuffle.seed, shuffle.stream), &block.order);
  block.group.resize(rows);
  for (size_t group = 0, row = 0; group < groups; ++group) {
    for (const auto end = static_cast<size_t>(ends[group]); row < end; ++row) {
      block.group[row] = static_cast<uint32_t>(group);
    }
  }
  return block;
}

template <typename Owner>
class RowBatcher {
 public:
  size_t waiting() const { return waiting_; }
  const std::deque<Block<Owner>>& blocks() const { return blocks_; }

  void Push(Block<Owner> block) {
    waiting_ += block.order.size() - block.taken;
    if (block.taken < block.order.size()) blocks_.push_back(std::move(block));
  }

  // Calls visit(block, rows, count) for each piece of the next `count` rows, at most waiting().
  template <typename Visit>
  void Next(size_t count, Visit visit) const {
    for (const Block<Owner>& block : blocks_) {
      const size_t own = std::min(count, block.order.size() - block.taken);
      visit(block, block.order.data() + block.taken, own);
      if ((count -= own) == 0) return;
    }
  }

  // Removes the next `count` rows.
  void Drop(size_t count) {
    waiting_ -= count;
    while (count > 0) {
      Block<Owner>& block = blocks_.front();
      const size_t own = std::min(count, block.order.size() - block.taken);
      block.taken += own;
      count -= own;
      if (block.taken == block.order.size()) blocks_.pop_front();
    }
  }

 private:
  std::deque<Block<Owner>> blocks_;  // each has a row that wasn't taken yet
  size_t waiting_ = 0;
};

// Writes the rows' values, and returns the place for the next ones.
template <typename T>
T* GatherRows(const T* values, const uint32_t* rows, size_t count, T* out) {
  for (size_t i = 0; i < count; ++i) out[i] = values[rows[i]];
  return out + count;
}

// Does the same for a column of groups: `group` has the group of each of the block's rows.
template <typename T>
T* GatherGroups(const T* values, const uint32_t* group, const uint32_t* rows, size_t count,
                T* out) {
  for (size_t i = 0; i < count; ++i) out[i] = values[group[rows[i]]];
  return out + count;
}

// Writes the end of each of the rows' lists. The first list begins at `before`. Returns the end of
// the last one.
inline int64_t GatherEnds(const int64_t* splits, const uint32_t* rows, size_t count, int64_t before,
                          int64_t* out) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = before += splits[rows[i] + size_t{1}] - splits[rows[i]];
  }
  return before;
}

// Writes the rows' lists one after another.
template <typename T>
T* GatherLists(const T* values, const int64_t* splits, const uint32_t* rows, size_t count, T* out) {
  for (size_t i = 0; i < count; ++i) {
    const T* end = values + splits[rows[i] + size_t{1}];
    for (const T* value = values + splits[rows[i]]; value != end; ++value) *out++ = *value;
  }
  return out;
}

}  // namespace gmeta::rows

#endif  // GMETA_IO_ROWS_ROW_BATCHER_H_
