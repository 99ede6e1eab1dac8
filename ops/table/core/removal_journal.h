// RemovalJournal: the keys that a shard has removed since it was last saved. An incremental save
// needs them: the last step of a row shows whether the row has changed, but a removed row leaves no
// such trace.
//
// Two parts
//   `noted_` grows as keys are removed. A save first calls Cut, which moves keys to `cut_`, and
//   writes them from there. Once the save is safe on disk, DropCut forgets them. If the save fails,
//   they stay, and the next save calls Cut again and writes both the old and the new keys. Keys
//   removed while a save runs are added to `noted_`.
//
// Bound
//   A shard keeps up to `limit` noted keys. When it reaches the limit, it drops duplicates (a key
//   may come and go many times). If more than half of the limit is left, the journal breaks: it
//   forgets its keys and isn't whole until it is started again, which a full save does. An import
//   changes rows without removing them or setting their last step. Keys can't record that, so it
//   breaks the journal as well.
//
// When the journal is off, it costs one comparison per removed key. Not thread-safe: Shard has the
// lock.

#ifndef GMETA_OPS_TABLE_CORE_REMOVAL_JOURNAL_H_
#define GMETA_OPS_TABLE_CORE_REMOVAL_JOURNAL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gmeta {

class RemovalJournal {
 public:
  // Forgets all keys, and notes up to `limit` keys from now on; 0 turns the journal off.
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

  // Moves the noted keys for which belongs(key) is true to the cut ones. Then calls visit(key) once
  // for each cut key for which belongs(key) is true, in ascending order.
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

  // Forgets the cut keys, once they have been saved.
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
