// Rows of groups, shuffled and dealt out in batches.
//
// A block is the rows of some neighbouring groups, column by column, in memory of somebody else.
// Its rows are permuted among each other (Fisher and Yates, draws.h), and batches take them in that
// order. A batch goes on where the last one ended, and into as many blocks as it needs:
//
//     blocks (each in its own order)    3 1 0 2 | 1 0 | 2 0 1      rows a batch: 5
//     batches                           ^^^^^^^^^^^       ^ ^^^^^   the third has one row
//
// Blocks wait in a queue. Of each the queue keeps what draws its order again, and how many of its
// rows were taken, so that a saved queue is the blocks that wait and two numbers each.
//
// Why it is fast: a column of a batch is written once, straight from the block to the batch.
// Nothing is permuted in between and no stretches are joined: a row of 21 columns costs 21 loads
// from a block that was made small enough for the cache, and 21 stores one after another. The order
// is 4 bytes a row, shared by all columns.
//
// Columns are of three kinds. One value a row; a list a row, values and row splits; or one value a
// group, as the task's id, which the row finds by the number of its group.

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

// What draws a block's order.
struct Shuffle {
  bool on = false;
  Seed seed;
  uint64_t stream = 0;
};

// Rows that wait. Owner keeps the columns' memory, and is only handed back.
template <typename Owner>
struct Block {
  Owner owner;
  std::vector<uint32_t> order;  // the rows, as batches take them
  std::vector<uint32_t> group;  // of each row
  size_t taken = 0;             // so many of `order` went into earlier batches
};

// `ends` has the row behind each group; less than 2^32 rows.
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

  // Calls visit(block, rows, count) for each stretch of the next `count` rows, at most waiting().
  template <typename Visit>
  void Next(size_t count, Visit visit) const {
    for (const Block<Owner>& block : blocks_) {
      const size_t own = std::min(count, block.order.size() - block.taken);
      visit(block, block.order.data() + block.taken, own);
      if ((count -= own) == 0) return;
    }
  }

  // Takes the next `count` rows off.
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
  std::deque<Block<Owner>> blocks_;  // each with a row that wasn't taken
  size_t waiting_ = 0;
};

// Writes the rows' values, and returns where the next ones go.
template <typename T>
T* GatherRows(const T* values, const uint32_t* rows, size_t count, T* out) {
  for (size_t i = 0; i < count; ++i) out[i] = values[rows[i]];
  return out + count;
}

// The same for a column of groups: `group` has the group of each of the block's rows.
template <typename T>
T* GatherGroups(const T* values, const uint32_t* group, const uint32_t* rows, size_t count,
                T* out) {
  for (size_t i = 0; i < count; ++i) out[i] = values[group[rows[i]]];
  return out + count;
}

// Writes where each of the rows' lists ends, the first of them beginning at `before`; returns where
// the last one does.
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
