// The order of an epoch: a permutation of groups that is a pure function of a seed.
//
// Files are permuted first (Fisher and Yates). Then groups pass through a buffer of B groups: it is
// filled, and each group that leaves is drawn from it uniformly and replaced by the next one read.
// If B is at least the number of groups, the permutation is uniform. With a smaller B, a group can
// move forwards by any distance but backwards by B at most, and only B groups are ever in memory.

#ifndef GMETA_IO_GROUP_BATCH_GROUP_SHUFFLE_H_
#define GMETA_IO_GROUP_BATCH_GROUP_SHUFFLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/draws.h"
#include "io/group_batch/group_batch.h"

namespace gmeta::group_batch {

// Reads groups in a shuffled order. A buffer of 0 keeps the order of the files.
class GroupShuffle {
 public:
  GroupShuffle(GroupOptions options, std::vector<std::string> files, OpenFile open,
               ReaderStats* stats, size_t buffer, Seed seed)
      : reader_(std::move(options), Permuted(std::move(files), buffer, seed), std::move(open),
                stats),
        capacity_(buffer),
        draws_(seed, 1) {}

  GroupReader& reader() { return reader_; }

  // Does the same as GroupReader::Next. A problem while the buffer fills leaves the buffer as it
  // is.
  GroupReader::Result Next(std::unique_ptr<Group>* group, Problem* problem) {
    using Result = GroupReader::Result;
    if (capacity_ == 0) return reader_.Next(group, problem);
    while (!ended_ && buffer_.size() < capacity_) {
      std::unique_ptr<Group> read;
      const Result result = reader_.Next(&read, problem);
      if (result == Result::kProblem) return result;
      ended_ = result == Result::kEnd;
      if (!ended_) buffer_.push_back(std::move(read));
    }
    if (buffer_.empty()) return Result::kEnd;
    std::swap(buffer_[draws_.Below(buffer_.size())], buffer_.back());
    *group = std::move(buffer_.back());
    buffer_.pop_back();
    return Result::kGroup;
  }

 private:
  static std::vector<std::string> Permuted(std::vector<std::string> files, size_t buffer,
                                           Seed seed) {
    if (buffer > 0) Permute(Draws(seed, 0), &files);
    return files;
  }

  GroupReader reader_;
  const size_t capacity_;
  Draws draws_;
  std::vector<std::unique_ptr<Group>> buffer_;
  bool ended_ = false;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_GROUP_SHUFFLE_H_
