// The order of an epoch over groups that an index can address: a permutation that is a pure
// function of (seed, epoch). Any part of it can be computed without the parts before it.
//
// A uniform permutation of all groups would read each group from another place of the disk, a few
// kilobytes at a time. So groups are permuted in two steps, both by Fisher and Yates: first blocks
// of B neighbours, over the whole data set, then all groups of W / B blocks among each other.
//
//     groups on disk      0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17        B = 4
//     blocks, permuted    12 13 14 15 | 4 5 6 7 | 16 17 | 8 9 10 11 | 0 1 2 3
//     windows, permuted   [ 5 14 4 12 7 13 6 15 ] [ 9 16 8 17 11 10 ] [ 2 0 3 1 ]      W = 8
//
// A window is read whole, in pieces of B groups, so reading stays sequential enough for a disk or
// an object store, and only a window has to be in memory. Preprocessing has already permuted the
// groups once, so neighbours on disk are unrelated. If W is at least the number of groups, the
// permutation is uniform.
//
// The place of a group in the epoch depends on neither ranks nor cursors: ranks take ranges of
// positions, and after a change of their number take other ranges of the same order. B is W / 64,
// so W and the seed determine the order. W = 0 is the order on disk; it is also read in windows, so
// that the reader has one way of reading.
//
// If B doesn't divide the number of groups, one block is shorter than B. It may be any of the
// permuted blocks, and only the windows after it begin at a position that isn't a multiple of the
// window.

#ifndef GMETA_IO_GROUP_BATCH_EPOCH_ORDER_H_
#define GMETA_IO_GROUP_BATCH_EPOCH_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/group_batch/draws.h"

namespace gmeta::group_batch {

class EpochOrder {
 public:
  static constexpr int64_t kBlocksAWindow = 64;
  static constexpr int64_t kSequential = 512;  // groups per window if nothing is permuted

  // Positions are 0 to groups - 1.
  EpochOrder(int64_t groups, int64_t window, Seed seed)
      : groups_(groups),
        permuted_(window > 0),
        seed_(seed),
        block_(permuted_ ? std::max<int64_t>(1, window / kBlocksAWindow) : kSequential),
        blocks_a_window_(permuted_ ? std::max<int64_t>(1, window / block_) : 1),
        count_((groups + block_ - 1) / block_),
        short_(count_ - 1) {
    if (!permuted_) return;
    blocks_.resize(static_cast<size_t>(count_));
    for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i] = static_cast<int64_t>(i);
    Permute(Draws(seed_, 0), &blocks_);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i] == count_ - 1) short_ = static_cast<int64_t>(i);
    }
  }

  int64_t windows() const { return (count_ + blocks_a_window_ - 1) / blocks_a_window_; }

  // Returns the position of a window's first group. For windows(), returns the number of groups.
  int64_t Start(int64_t window) const {
    const int64_t blocks = std::min(count_, window * blocks_a_window_);
    return blocks * block_ - (blocks > short_ ? count_ * block_ - groups_ : 0);
  }

  // Returns the window that contains a position.
  int64_t WindowOf(int64_t position) const {
    int64_t window = position / (block_ * blocks_a_window_);
    while (Start(window + 1) <= position) ++window;
    return window;
  }

  // Returns the groups of a window, in their order.
  std::vector<int64_t> Groups(int64_t window) const {
    std::vector<int64_t> groups;
    const int64_t last = std::min(count_, (window + 1) * blocks_a_window_);
    for (int64_t i = window * blocks_a_window_; i < last; ++i) {
      const int64_t block = permuted_ ? blocks_[static_cast<size_t>(i)] : i;
      const int64_t end = std::min(groups_, (block + 1) * block_);
      for (int64_t group = block * block_; group < end; ++group) groups.push_back(group);
    }
    if (permuted_) Permute(Draws(seed_, 1 + static_cast<uint64_t>(window)), &groups);
    return groups;
  }

 private:
  const int64_t groups_;
  const bool permuted_;
  const Seed seed_;
  const int64_t block_;
  const int64_t blocks_a_window_;
  const int64_t count_;  // number of blocks
  int64_t short_;        // permuted place of the last block on disk, which may be short
  std::vector<int64_t> blocks_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_EPOCH_ORDER_H_
