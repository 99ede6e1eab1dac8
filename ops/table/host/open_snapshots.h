// OpenSnapshots: which snapshots of a table are open (undo_log.h), and at which steps they were
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
  // Adds one that is taken at a step. Returns its id, which no other snapshot of any table has: one
  // table may take another's place.
  int64_t Add(int64_t step) {
    static std::atomic<int64_t> next{0};
    open_.push_back({next++, step});
    return open_.back().id;
  }

  // Where it is, counted from the oldest, if it is open.
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
