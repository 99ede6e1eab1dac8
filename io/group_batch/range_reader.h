// Reads a range of an epoch's positions, and outputs blocks of parsed groups in the same order.
//
// The slow work is spread over threads. Each stage runs a limited distance ahead of the next one:
//
//     loader (1 thread)     window 0 | window 1 | ...        files -> bytes        1 window ahead
//     parsers (n threads)   block 0 | block 1 | block 2 ...  bytes -> columns      `slots` blocks
//     consumer              Next()                                                 in order
//
// A block is up to `groups_a_block` neighbours of one window. Its bytes belong to the window, which
// the blocks parsed from it share; the last of them frees it. So memory holds two windows, and the
// blocks parsed ahead of the consumer, however long the range is.
//
// The range is given as spans of positions, read one after another: one span at the beginning of an
// epoch, several if another number of ranks resumes the epoch. The first `skip` positions are
// skipped without being read. Restoring does nothing else.

#ifndef GMETA_IO_GROUP_BATCH_RANGE_READER_H_
#define GMETA_IO_GROUP_BATCH_RANGE_READER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "io/group_batch/epoch_order.h"
#include "io/group_batch/group_block.h"
#include "io/group_batch/group_window.h"
#include "io/group_batch/ordered_workers.h"

namespace gmeta::group_batch {

// The positions `begin` to `end` - 1 of an epoch.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

struct RangeOptions {
  BlockOptions block;
  std::vector<ShardSpec> shards;
  OpenFile open;
  size_t threads = 2;  // parser threads
  size_t slots = 8;    // blocks parsed ahead
  int64_t groups_a_block = 32;
};

class RangeReader {
 public:
  // `options` and `order` must outlive it.
  RangeReader(const RangeOptions& options, const EpochOrder& order, const std::vector<Span>& spans,
              int64_t skip)
      : options_(options),
        order_(order),
        loader_(options.shards, options.block.layout, options.open) {
    Cut(spans, skip);
    for (size_t i = 0; i < options_.threads; ++i) {
      parsers_.push_back(std::make_unique<BlockParser>(options_.block));
    }
    windows_ = std::make_unique<Windows>(
        1, 1, [this](int64_t number, size_t) { return LoadPiece(number); });
    blocks_ = std::make_unique<Blocks>(
        options_.threads, options_.slots,
        [this](int64_t number, size_t worker) { return ParseBlock(number, worker); });
  }

  ~RangeReader() {
    Cancel();
    blocks_.reset();  // before the windows, for which its threads wait
  }

  // Returns the next groups; null after the last ones, or after Cancel().
  std::unique_ptr<GroupBlock> Next() {
    std::optional<std::unique_ptr<GroupBlock>> block = blocks_->Next();
    return block.has_value() ? std::move(*block) : nullptr;
  }

  // Takes back a block that is no longer needed, to reuse its memory.
  void Recycle(std::unique_ptr<GroupBlock> block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.size() < options_.slots) spare_.push_back(std::move(block));
  }

  // Makes a waiting Next() return, now and in the future. Any thread may call it.
  void Cancel() {
    windows_->Cancel();
    blocks_->Cancel();
  }

 private:
  using Windows = OrderedWorkers<std::shared_ptr<GroupWindow>>;
  using Blocks = OrderedWorkers<std::unique_ptr<GroupBlock>>;

  // The part of a window that is read at once, and the number of its first block.
  struct Piece {
    int64_t window;
    Span positions;
    int64_t first_block;
  };

  void Cut(const std::vector<Span>& spans, int64_t skip) {
    int64_t blocks = 0;
    for (Span span : spans) {
      const int64_t passed = std::min(skip, span.end - span.begin);
      span.begin += passed;
      skip -= passed;
      while (span.begin < span.end) {
        const int64_t window = order_.WindowOf(span.begin);
        const int64_t end = std::min(span.end, order_.Start(window + 1));
        pieces_.push_back({window, {span.begin, end}, blocks});
        blocks += (end - span.begin + options_.groups_a_block - 1) / options_.groups_a_block;
        span.begin = end;
      }
    }
    blocks_in_all_ = blocks;
  }

  std::optional<std::shared_ptr<GroupWindow>> LoadPiece(int64_t number) {
    if (number >= static_cast<int64_t>(pieces_.size())) return std::nullopt;
    const Piece& piece = pieces_[static_cast<size_t>(number)];
    std::vector<int64_t> groups = order_.Groups(piece.window);
    const int64_t start = order_.Start(piece.window);
    groups.erase(groups.begin() + (piece.positions.end - start), groups.end());
    groups.erase(groups.begin(), groups.begin() + (piece.positions.begin - start));
    return loader_.Load(groups);
  }

  std::optional<std::unique_ptr<GroupBlock>> ParseBlock(int64_t number, size_t worker) {
    if (number >= blocks_in_all_) return std::nullopt;
    const auto after =
        std::upper_bound(pieces_.begin(), pieces_.end(), number,
                         [](int64_t n, const Piece& p) { return n < p.first_block; });
    const auto place = static_cast<size_t>(after - pieces_.begin()) - 1;
    const std::shared_ptr<GroupWindow> window = Window(place);
    if (window == nullptr) return std::nullopt;  // cancelled
    const int64_t block_in_piece = number - pieces_[place].first_block;
    const auto begin = static_cast<size_t>(block_in_piece * options_.groups_a_block);
    const size_t end =
        std::min(window->groups.size(), begin + static_cast<size_t>(options_.groups_a_block));
    std::unique_ptr<GroupBlock> block = NewBlock();
    for (size_t i = begin; i < end; ++i) parsers_[worker]->Parse(window->groups[i], block.get());
    return block;
  }

  // Returns the window of a piece. Blocks are claimed in order, so pieces are first requested in
  // order. After all blocks of a piece have requested it, it isn't requested again.
  std::shared_ptr<GroupWindow> Window(size_t piece) {
    std::lock_guard<std::mutex> lock(windows_mutex_);
    while (first_held_ + held_.size() <= piece) {
      std::optional<std::shared_ptr<GroupWindow>> next = windows_->Next();
      if (!next.has_value()) return nullptr;
      const size_t number = first_held_ + held_.size();
      const int64_t end =
          number + 1 < pieces_.size() ? pieces_[number + 1].first_block : blocks_in_all_;
      held_.push_back({std::move(*next), end - pieces_[number].first_block});
    }
    Held& held = held_[piece - first_held_];
    std::shared_ptr<GroupWindow> window = held.window;
    if (--held.blocks_left == 0) held.window.reset();
    while (!held_.empty() && held_.front().blocks_left == 0) {
      held_.pop_front();
      ++first_held_;
    }
    return window;
  }

  std::unique_ptr<GroupBlock> NewBlock() {
    std::unique_ptr<GroupBlock> block;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!spare_.empty()) {
        block = std::move(spare_.back());
        spare_.pop_back();
      }
    }
    if (block == nullptr) block = std::make_unique<GroupBlock>();
    block->columns.resize(options_.block.columns.size());
    for (ColumnBuffer& column : block->columns) {
      column.ints.clear();
      column.floats.clear();
      column.ends.clear();
    }
    block->entries.clear();
    block->problems.clear();
    return block;
  }

  struct Held {
    std::shared_ptr<GroupWindow> window;
    int64_t blocks_left;
  };

  const RangeOptions& options_;
  const EpochOrder& order_;
  WindowLoader loader_;
  std::vector<Piece> pieces_;
  int64_t blocks_in_all_ = 0;
  std::vector<std::unique_ptr<BlockParser>> parsers_;

  std::mutex windows_mutex_;
  std::deque<Held> held_;  // windows with blocks not yet begun
  size_t first_held_ = 0;

  std::mutex mutex_;
  std::vector<std::unique_ptr<GroupBlock>> spare_;

  std::unique_ptr<Windows> windows_;
  std::unique_ptr<Blocks> blocks_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_RANGE_READER_H_
