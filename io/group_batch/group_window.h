// Loading: reads the bytes of a window's groups from wherever they are on the disk.
//
// The epoch's order of groups differs from the disk's. So the groups' numbers are sorted, and
// entries of the index are read in runs of neighbours. Then the bytes are read, in spans. A span
// includes the bytes between two groups that are near each other (another rank's, in a window that
// two ranks share): a gap below 64 KiB costs less than another request. Each group then refers to
// its bytes, and parsing needs no file.
//
//     index      entries 17..19      40..44                       two reads
//     shard      [17 18 19]..gap..[40 41] | [42 43 44]            two spans, cut at 8 MiB
//     window     42 17 44 19 ...                                  views into them
//
// A shard that can't be opened, or whose index belongs to another plan, costs all its groups, and
// is reported once. An entry with an impossible place costs its group. Whatever the entries say,
// spans don't overlap and end where the shard does: a window takes no more memory than its shards.

#ifndef GMETA_IO_GROUP_BATCH_GROUP_WINDOW_H_
#define GMETA_IO_GROUP_BATCH_GROUP_WINDOW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/problem.h"
#include "io/group_batch/shard_index.h"
#include "io/records/columnar.h"
#include "io/records/tfrecord.h"

namespace gmeta::group_batch {

// Opens a file, or returns null and sets `error` to the reason.
using OpenFile = std::function<std::unique_ptr<records::ByteSource>(const std::string& path,
                                                                    std::string* error)>;

// A group's bytes, or the problem that prevents reading them.
struct LoadedGroup {
  const char* data = nullptr;  // null: it has a problem, or its whole shard was reported
  size_t size = 0;
  size_t shard = 0;
  IndexEntry entry;
  Problem problem;
};

struct GroupWindow {
  std::vector<LoadedGroup> groups;
  std::vector<std::unique_ptr<char[]>> spans;
};

// Loads windows, one at a time, on one thread.
class WindowLoader {
 public:
  static constexpr int64_t kEntryGap = 16;
  static constexpr uint64_t kGap = 64 << 10;
  static constexpr uint64_t kSpan = 8 << 20;
  static constexpr uint64_t kLargest = uint64_t{1} << 30;  // most bytes of a group
  static constexpr size_t kOpenShards = 32;

  WindowLoader(std::vector<ShardSpec> shards, Layout layout, OpenFile open)
      : shards_(std::move(shards)),
        layout_(layout),
        open_(std::move(open)),
        starts_(1),
        reported_(shards_.size()) {
    for (const ShardSpec& shard : shards_) starts_.push_back(starts_.back() + shard.groups);
  }

  // Loads the groups with these numbers, in their order.
  std::shared_ptr<GroupWindow> Load(const std::vector<int64_t>& numbers) {
    auto window = std::make_shared<GroupWindow>();
    window->groups.resize(numbers.size());
    std::vector<size_t> order(numbers.size());  // places in the window, in the order on the disk
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return numbers[a] < numbers[b]; });
    for (size_t i = 0; i < order.size();) {
      const size_t shard = ShardOf(numbers[order[i]]);
      size_t end = i;
      while (end < order.size() && numbers[order[end]] < starts_[shard + 1]) ++end;
      LoadShard(shard, numbers, order.data() + i, order.data() + end, window.get());
      i = end;
    }
    return window;
  }

 private:
  struct OpenShard {
    size_t number = 0;
    std::unique_ptr<records::ByteSource> source;
    std::unique_ptr<ShardIndex> index;
    bool cut_group = false;  // its first group continues the last one of the shard before
  };

  size_t ShardOf(int64_t group) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), group);
    return static_cast<size_t>(after - starts_.begin()) - 1;
  }

  // Loads the groups at these places of the window, all in one shard.
  void LoadShard(size_t shard, const std::vector<int64_t>& numbers, const size_t* begin,
                 const size_t* end, GroupWindow* window) {
    for (const size_t* i = begin; i != end; ++i) window->groups[*i].shard = shard;
    Problem problem;
    OpenShard* opened = Open(shard, &problem);
    if (opened == nullptr) {
      if (!reported_[shard]) window->groups[*std::min_element(begin, end)].problem = problem;
      reported_[shard] = true;
      return;
    }
    LoadEntries(opened, numbers, begin, end, window);
    std::vector<size_t> found;  // in the order on the disk, which any written index has
    for (const size_t* i = begin; i != end; ++i) {
      if (window->groups[*i].size > 0) found.push_back(*i);
    }
    const auto behind = [&](size_t a, size_t b) {
      return window->groups[a].entry.offset < window->groups[b].entry.offset;
    };
    if (!std::is_sorted(found.begin(), found.end(), behind)) {
      std::stable_sort(found.begin(), found.end(), behind);
    }
    for (size_t i = 0; i < found.size();) i = LoadSpan(opened, found, i, window);
  }

  void LoadEntries(OpenShard* opened, const std::vector<int64_t>& numbers, const size_t* begin,
                   const size_t* end, GroupWindow* window) {
    std::vector<IndexEntry> entries;
    for (const size_t* i = begin; i != end;) {
      const int64_t first = numbers[*i];
      const size_t* last = i;
      while (last + 1 != end && numbers[last[1]] - numbers[last[0]] <= kEntryGap) ++last;
      Finding finding = opened->index->ReadEntries(first - starts_[opened->number],
                                                   numbers[*last] - first + 1, &entries);
      for (; i <= last; ++i) {
        LoadedGroup& group = window->groups[*i];
        const auto place = static_cast<size_t>(numbers[*i] - first);
        if (finding.fault == Fault::kNone) {
          group.entry = entries[place];
          if (opened->cut_group && numbers[*i] == starts_[opened->number]) {
            group.problem = Located(shards_[opened->number].path, 0, Split(*opened, group.entry));
          } else {
            Measure(*opened, entries[place + 1].offset, &group);
          }
        } else {
          group.problem = Located(index_path(opened->number), 0, finding);
        }
      }
    }
  }

  Finding Split(const OpenShard& opened, const IndexEntry& entry) const {
    return {Fault::kNotContiguous, PossibleRows(opened, entry),
            "the group of " + Name(entry.key) + " was begun in the shard before, " +
                shards_[opened.number - 1].path,
            "write all rows of a task and batch to one shard, as `gmeta prepare` does"};
  }

  // Returns whether this number of bytes can hold this number of rows. A row takes at least one
  // byte before compression.
  bool CanHold(uint64_t bytes, int64_t rows) const {
    const uint64_t ratio = layout_ == Layout::kColumnar ? records::columnar::kMaxRatio : 1;
    return rows > 0 && static_cast<uint64_t>(rows) / ratio <= bytes;
  }

  // Returns the number of rows that an entry states, for counting them; 0 if it is impossible.
  int64_t PossibleRows(const OpenShard& opened, const IndexEntry& entry) const {
    return CanHold(opened.index->shard_bytes(), entry.rows) ? entry.rows : 0;
  }

  // Sets the group's size in bytes, if it is possible, or else its problem.
  void Measure(const OpenShard& opened, int64_t end, LoadedGroup* group) const {
    const IndexEntry& entry = group->entry;
    const bool possible = entry.offset >= 0 && end > entry.offset &&
                          static_cast<uint64_t>(end) <= opened.index->shard_bytes() &&
                          static_cast<uint64_t>(end - entry.offset) <= kLargest &&
                          CanHold(static_cast<uint64_t>(end - entry.offset), entry.rows);
    if (possible) {
      group->size = static_cast<size_t>(end - entry.offset);
    } else {
      group->problem = Located(
          index_path(opened.number), 0,
          {Fault::kBadIndex, PossibleRows(opened, entry),
           "the group of " + Name(entry.key) + " can't have " + std::to_string(entry.rows) +
               " rows at bytes " + std::to_string(entry.offset) + " to " + std::to_string(end),
           "prepare the data again"});
    }
  }

  // Reads one span, beginning with the group at place `first`. Returns the place of the next span's
  // first group.
  size_t LoadSpan(OpenShard* opened, const std::vector<size_t>& found, size_t first,
                  GroupWindow* window) {
    std::vector<LoadedGroup>& groups = window->groups;
    const auto start = static_cast<uint64_t>(groups[found[first]].entry.offset);
    uint64_t stop = start + groups[found[first]].size;
    size_t next = first + 1;
    for (; next != found.size(); ++next) {
      const LoadedGroup& group = groups[found[next]];
      const auto at = static_cast<uint64_t>(group.entry.offset);
      if (at >= stop && (at - stop > kGap || at + group.size - start > kSpan)) break;
      stop = std::max(stop, at + group.size);
    }
    // If the shard was cut, read the bytes that are left.
    const uint64_t end = std::clamp(opened->source->size(), start, stop);
    std::unique_ptr<char[]> bytes(new char[end - start]);  // not zeroed
    std::string error;
    const size_t got = opened->source->Read(start, end - start, bytes.get(), &error);
    for (size_t i = first; i != next; ++i) {
      LoadedGroup& group = groups[found[i]];
      const uint64_t at = static_cast<uint64_t>(group.entry.offset) - start;
      if (!error.empty() || at + group.size > got) {
        const Fault fault = error.empty() ? Fault::kTruncated : Fault::kRead;
        Finding finding = FramingFinding(fault, 0, error);
        finding.skipped = group.entry.rows;
        group.problem = Located(shards_[opened->number].path,
                                static_cast<uint64_t>(group.entry.offset), finding);
        group.size = 0;
      } else {
        group.data = bytes.get() + at;
      }
    }
    window->spans.push_back(std::move(bytes));
    return next;
  }

  // Returns the shard if it is open. Otherwise opens it, in place of the least recently used one.
  OpenShard* Open(size_t shard, Problem* problem) {
    for (auto i = open_shards_.begin(); i != open_shards_.end(); ++i) {
      if (i->number != shard) continue;
      open_shards_.splice(open_shards_.begin(), open_shards_, i);
      return &open_shards_.front();
    }
    OpenShard opened{shard, OpenOrSay(shards_[shard].path, problem), nullptr};
    if (opened.source == nullptr) return nullptr;
    auto index = OpenOrSay(index_path(shard), problem);
    if (index == nullptr) return nullptr;
    opened.index = std::make_unique<ShardIndex>(shards_[shard], layout_, opened.source->size(),
                                                std::move(index));
    if (Finding finding = opened.index->Check(); finding.fault != Fault::kNone) {
      *problem = Located(index_path(shard), 0, std::move(finding));
      return nullptr;
    }
    opened.cut_group = GoesOn(*opened.index, shard);
    if (open_shards_.size() == kOpenShards) open_shards_.pop_back();
    open_shards_.push_front(std::move(opened));
    return &open_shards_.front();
  }

  // Returns whether the shard's first group has the key of the previous shard's last group. If
  // the previous shard can't be read, that is reported when it is read itself.
  bool GoesOn(ShardIndex& index, size_t shard) const {
    if (shard == 0 || shards_[shard].groups == 0 || shards_[shard - 1].groups == 0) return false;
    std::string error;
    std::vector<IndexEntry> last, first;
    auto source = open_(index_path(shard - 1), &error);
    if (source == nullptr) return false;
    ShardIndex before(shards_[shard - 1], layout_, 0, std::move(source));
    return before.Check().fault == Fault::kNone &&
           before.ReadEntries(shards_[shard - 1].groups - 1, 1, &last).fault == Fault::kNone &&
           index.ReadEntries(0, 1, &first).fault == Fault::kNone && last[0].key == first[0].key;
  }

  std::unique_ptr<records::ByteSource> OpenOrSay(const std::string& path, Problem* problem) const {
    std::string error;
    std::unique_ptr<records::ByteSource> source = open_(path, &error);
    if (source == nullptr) *problem = CantOpen(path, error);
    return source;
  }

  std::string index_path(size_t shard) const { return shards_[shard].path + ShardIndex::kSuffix; }

  const std::vector<ShardSpec> shards_;
  const Layout layout_;
  const OpenFile open_;
  std::vector<int64_t> starts_;  // the number of each shard's first group
  std::list<OpenShard> open_shards_;
  std::vector<bool> reported_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_GROUP_WINDOW_H_
