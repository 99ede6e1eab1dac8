// RemovalJournal: which keys a shard has lost since it was last saved. An incremental save needs
// them: rows that are there tell by their last step whether they changed, rows that are gone tell
// nothing.
//
// Two parts
//   `noted_` grows as keys are removed. A save cuts: keys move to `cut_`, and are written from
//   there. When the save is safe on the disk, DropCut forgets them; if it fails, they stay, and the
//   next save cuts again and writes both. What is removed while a save runs is noted anew.
//
// Bound
//   A shard keeps up to `limit` noted keys. When they are reached, doubles are dropped (a key may
//   come and go many times); if more than half is left, the journal breaks: it forgets its keys and
//   isn't whole until it is started again, which a full save does. Nothing that changes rows
//   without removing them or setting their last step (an import) can be told by keys, so that
//   breaks it as well.
//
// Off, it costs a comparison a removed key. Not thread-safe: Shard has the lock.

#ifndef GMETA_OPS_TABLE_CORE_REMOVAL_JOURNAL_H_
#define GMETA_OPS_TABLE_CORE_REMOVAL_JOURNAL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gmeta {

class RemovalJournal {
 public:
  // Forgets all, and notes up to `limit` keys from now on; 0 turns it off.
  void Start(size_t limit) {
    Break();
    limit_ = limit;
    whole_ = limit > 0;
  }

  // Whether every removal since Start has been noted.
  bool whole() const { return whole_; }

  void Break() {
    whole_ = false;
    noted_ = Keys();
    cut_ = Keys();
  }

  void Note(int64_t key) {
    if (!whole_) return;
    noted_.push_back(key);
    if (noted_.size() < limit_) return;
    SortDistinct(&noted_);
    if (noted_.size() > limit_ / 2) Break();
  }

  // Cuts the keys for which belongs(key), and calls visit(key) for each cut key of that kind, once,
  // ascending.
  template <class Belongs, class Visit>
  void Cut(const Belongs& belongs, const Visit& visit) {
    const auto moved =
        std::partition(noted_.begin(), noted_.end(), [&](int64_t key) { return !belongs(key); });
    cut_.insert(cut_.end(), moved, noted_.end());
    noted_.erase(moved, noted_.end());
    SortDistinct(&cut_);
    for (const int64_t key : cut_) {
      if (belongs(key)) visit(key);
    }
  }

  // The cut keys have been saved.
  void DropCut() { cut_ = Keys(); }

  size_t bytes() const { return (noted_.capacity() + cut_.capacity()) * sizeof(int64_t); }

 private:
  using Keys = std::vector<int64_t>;

  static void SortDistinct(Keys* keys) {
    std::sort(keys->begin(), keys->end());
    keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
  }

  size_t limit_ = 0;
  bool whole_ = false;
  Keys noted_;
  Keys cut_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_REMOVAL_JOURNAL_H_
