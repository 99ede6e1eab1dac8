// Elements: which groups a reader outputs together, and its position.
//
// Each lane is a range of the epoch, read independently of the others. A rank has one lane, or
// several if it has taken over those of lost ranks. From each lane an element takes a fixed number
// of groups, or as many as reach a target cost (io/balance/prefix_batcher.h):
//
//     lane 0   [ . . . . | . . . . | . .          element k: the k-th batch of every lane,
//     lane 1   [ . . . . | . . . . | . . . .      lane by lane, without copying: slices of blocks
//
// Groups are counted by their places in the order, sound or bad. So a bad one makes its batch
// smaller, instead of shifting all later groups. So the data of a step is a function of the
// step's number, by which all ranks can plan, and a lane's whole state is its cursor, the number of
// places already taken. If a plan has more steps than a lane has batches, the lane's later batches
// are empty.
//
// A problem is reported before the element that it falls into, and once. The next call continues
// after it, just as if the bad data were left out.

#ifndef GMETA_IO_GROUP_BATCH_ELEMENT_READER_H_
#define GMETA_IO_GROUP_BATCH_ELEMENT_READER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "io/balance/prefix_batcher.h"
#include "io/group_batch/problem.h"
#include "io/group_batch/range_reader.h"
#include "io/group_batch/reader_stats.h"

namespace gmeta::group_batch {

// A range of neighbouring entries of a block.
struct Slice {
  const GroupBlock* block = nullptr;
  size_t begin = 0;
  size_t end = 0;
};

// How many groups an element takes from a lane: `groups`, or as many as reach `balance`'s target.
struct ElementOptions {
  int64_t groups = 1;
  std::optional<balance::BatchCost> balance;
  // A list column whose values are a group's tokens, or a column of integers whose last one is the
  // number of tokens that the group has besides its rows; -1: its rows count.
  int token_column = -1;
  bool token_lists = false;  // whether it is a list column
  OnBad on_bad = OnBad::kRaise;
};

class Lane {
 public:
  enum class Result { kTaken, kEnd, kProblem };

  Lane(const RangeOptions& range, const ElementOptions& options, const EpochOrder& order,
       const std::vector<Span>& spans, int64_t skip, ReaderStats* stats)
      : options_(options), stats_(stats), cursor_(skip), reader_(range, order, spans, skip) {
    if (options.balance.has_value()) batcher_.emplace(*options.balance);
  }

  // Adds the next batch's groups to `slices`. The slices are valid until Release().
  Result Take(std::vector<Slice>* slices, Problem* problem) {
    while (batcher_ ? batcher_->hungry() : waiting_ < options_.groups) {
      const Result result = Scan(problem);
      if (result == Result::kProblem) return result;
      if (result == Result::kEnd) break;
    }
    if (waiting_ == 0) return Result::kEnd;
    int64_t count =
        batcher_ ? static_cast<int64_t>(batcher_->Cut()) : std::min(waiting_, options_.groups);
    waiting_ -= count;
    cursor_ += count;
    while (count > 0) {
      if (taken_in_block_ == blocks_[taken_block_]->entries.size()) {
        ++taken_block_;
        taken_in_block_ = 0;
      }
      const GroupBlock& block = *blocks_[taken_block_];
      const size_t end =
          std::min(block.entries.size(), taken_in_block_ + static_cast<size_t>(count));
      slices->push_back({&block, taken_in_block_, end});
      Count(slices->back());
      count -= static_cast<int64_t>(end - taken_in_block_);
      taken_in_block_ = end;
    }
    return Result::kTaken;
  }

  // Releases the memory of the batches taken so far.
  void Release() {
    for (; taken_block_ > 0; --taken_block_, --scanned_block_) {
      reader_.Recycle(std::move(blocks_.front()));
      blocks_.pop_front();
    }
  }

  void Cancel() { reader_.Cancel(); }

  // Returns the number of places already taken.
  int64_t cursor() const { return cursor_; }

 private:
  // Scans one more entry.
  Result Scan(Problem* problem) {
    if (scanned_block_ < blocks_.size() &&
        scanned_in_block_ == blocks_[scanned_block_]->entries.size()) {
      ++scanned_block_;
      scanned_in_block_ = told_ = 0;
    }
    if (scanned_block_ == blocks_.size()) {
      std::unique_ptr<GroupBlock> block = reader_.Next();
      if (block == nullptr) return Result::kEnd;
      blocks_.push_back(std::move(block));
    }
    GroupBlock& block = *blocks_[scanned_block_];
    while (told_ < block.problems.size() && block.problems[told_].entry == scanned_in_block_) {
      const Problem& found = block.problems[told_++].problem;
      if (stats_ != nullptr) stats_->AddFault(found.fault, found.skipped, found.message);
      if (options_.on_bad == OnBad::kSkip && !records::IsFatal(found.fault)) continue;
      *problem = found;
      return Result::kProblem;
    }
    if (batcher_) Weigh(block, scanned_in_block_);
    ++scanned_in_block_;
    ++waiting_;
    return Result::kTaken;
  }

  void Weigh(const GroupBlock& block, size_t entry) {
    const int64_t begin = block.row_begin(entry), end = block.entries[entry].row_end;
    if (options_.token_column < 0 || begin == end) return batcher_->Push(end - begin);
    const auto& column = block.columns[static_cast<size_t>(options_.token_column)];
    const size_t last = static_cast<size_t>(end) - 1;
    if (options_.token_lists) {
      const int64_t before = begin == 0 ? 0 : column.ends[static_cast<size_t>(begin) - 1];
      return batcher_->Push(column.ends[last] - before);
    }
    batcher_->Push(std::max<int64_t>(column.ints[last], 0), end - begin);
  }

  void Count(const Slice& slice) const {
    if (stats_ == nullptr) return;
    for (size_t i = slice.begin; i < slice.end; ++i) {
      const GroupBlock::Entry& entry = slice.block->entries[i];
      if (entry.sound) stats_->AddGroup(entry.row_end - slice.block->row_begin(i));
    }
  }

  const ElementOptions& options_;
  ReaderStats* const stats_;
  int64_t cursor_;
  std::optional<balance::PrefixBatcher> batcher_;

  // Entries are scanned, wait, and are taken: two cursors over the blocks in memory.
  std::deque<std::unique_ptr<GroupBlock>> blocks_;
  size_t taken_block_ = 0, taken_in_block_ = 0;
  size_t scanned_block_ = 0, scanned_in_block_ = 0;
  size_t told_ = 0;  // number of reported problems in the scanned block
  int64_t waiting_ = 0;
  RangeReader reader_;  // last member, because its threads must end first
};

// Reads all lanes of a reader, one element at a time.
class ElementReader {
 public:
  using Result = Lane::Result;

  // Takes one cursor per lane, zeros at the beginning of an epoch. The arguments given by reference
  // must outlive it.
  ElementReader(const RangeOptions& range, const ElementOptions& options, const EpochOrder& order,
                const std::vector<std::vector<Span>>& lanes, const std::vector<int64_t>& cursors,
                ReaderStats* stats) {
    for (size_t i = 0; i < lanes.size(); ++i) {
      lanes_.push_back(std::make_unique<Lane>(range, options, order, lanes[i], cursors[i], stats));
    }
  }

  // Finds the next element, or reports a problem, after which the next call continues. Returns kEnd
  // when no lane has more.
  Result Next(Problem* problem) {
    for (; lane_ < lanes_.size(); ++lane_) {
      if (lanes_[lane_]->Take(&slices_, problem) == Result::kProblem) return Result::kProblem;
    }
    lane_ = 0;
    return slices_.empty() ? Result::kEnd : Result::kTaken;
  }

  const std::vector<Slice>& slices() const { return slices_; }

  // Ends the element. Its slices become invalid.
  void Release() {
    slices_.clear();
    for (const auto& lane : lanes_) lane->Release();
  }

  void Cancel() {
    for (const auto& lane : lanes_) lane->Cancel();
  }

  std::vector<int64_t> cursors() const {
    std::vector<int64_t> cursors;
    for (const auto& lane : lanes_) cursors.push_back(lane->cursor());
    return cursors;
  }

 private:
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Slice> slices_;
  size_t lane_ = 0;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_ELEMENT_READER_H_
