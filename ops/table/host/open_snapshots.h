// OpenSnapshots: the open snapshots of a table (undo_log.h), and the steps at which they were
// taken.
//
// Not thread-safe: Table has the lock.

#ifndef GMETA_OPS_TABLE_HOST_OPEN_SNAPSHOTS_H_
#define GMETA_OPS_TABLE_HOST_OPEN_SNAPSHOTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace gmeta {

class OpenSnapshots {
 public:
  // Adds a snapshot taken at this step. Returns its id, which is unique among the snapshots of all
  // tables, because one table may take another's place.
  int64_t Add(int64_t step) {
    static std::atomic<int64_t> next{0};
    open_.push_back({next++, step});
    return open_.back().id;
  }

  // The number of a snapshot, counted from the oldest, if it is open.
  std::optional<size_t> Number(int64_t id) const {
    for (size_t i = 0; i < open_.size(); ++i) {
      if (open_[i].id == id) return i;
    }
    return std::nullopt;
  }

  int64_t Step(size_t number) const { return open_[number].step; }
  void Drop(size_t number) { open_.erase(open_.begin() + static_cast<ptrdiff_t>(number)); }

 private:
  struct Snapshot {
    int64_t id;
    int64_t step;
  };
  std::vector<Snapshot> open_;  // the oldest first
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_OPEN_SNAPSHOTS_H_
