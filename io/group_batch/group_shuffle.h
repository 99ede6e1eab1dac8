// The order of an epoch: a permutation of groups that is a pure function of a seed.
//
// Files are permuted first (Fisher and Yates), then groups pass through a buffer of B: it is
// filled, and each group that leaves is drawn from it uniformly and replaced by the next one read.
// With B at least the number of groups the permutation is uniform; with fewer, a group can move
// forwards by any distance but backwards by B at most, and only B groups are ever in memory.
//
// The draws come from a counter, not from a generator with a state: draw i is Mix(key + i * odd),
// a splitmix64 sequence whose key is mixed from the two seed words. So draw i is known without the
// draws before it, one seed gives one order on every machine, and seeds that differ in one bit, as
// (seed, epoch) and (seed, epoch + 1) do, give unrelated orders. A draw below n is the high word of
// draw * n: its bias is n / 2^64.

#ifndef GMETA_IO_GROUP_BATCH_GROUP_SHUFFLE_H_
#define GMETA_IO_GROUP_BATCH_GROUP_SHUFFLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/group_batch.h"

namespace gmeta::group_batch {

struct Seed {
  int64_t first = 0;
  int64_t second = 0;
};

class Draws {
 public:
  // `stream` separates the uses of one seed.
  Draws(Seed seed, uint64_t stream)
      : key_(Mix(static_cast<uint64_t>(seed.first) +
                 Mix(static_cast<uint64_t>(seed.second) + Mix(stream)))) {}

  // The next draw, uniform in [0, n).
  size_t Below(size_t n) {
    const uint64_t draw = Mix(key_ + ++count_ * kOdd);
    return static_cast<size_t>((static_cast<unsigned __int128>(draw) * n) >> 64);
  }

 private:
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;

  static uint64_t Mix(uint64_t x) {
    x += kOdd;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  const uint64_t key_;
  uint64_t count_ = 0;
};

inline void Permute(Seed seed, std::vector<std::string>* files) {
  Draws draws(seed, 0);
  for (size_t left = files->size(); left > 1; --left) {
    std::swap((*files)[left - 1], (*files)[draws.Below(left)]);
  }
}

// Groups in an order of their own. A buffer of 0 keeps the order of the files.
class GroupShuffle {
 public:
  GroupShuffle(GroupOptions options, std::vector<std::string> files, OpenFile open,
               ReaderStats* stats, size_t buffer, Seed seed)
      : reader_(std::move(options), Permuted(std::move(files), buffer, seed), std::move(open),
                stats),
        capacity_(buffer),
        draws_(seed, 1) {}

  GroupReader& reader() { return reader_; }

  // As GroupReader::Next. A problem met while the buffer fills leaves the buffer as it is.
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
    if (buffer > 0) Permute(seed, &files);
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
