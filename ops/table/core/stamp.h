// Stamps: how a reader finds out later whether the row of a key is still what it read.
//
// A peek reads rows ahead of the step that uses them, and gets a stamp with each. The reread, at
// the row's turn, copies a row only if its stamp has changed meanwhile. A row that is copied in
// vain costs time; a changed row that isn't copied would be a wrong number. So equal stamps must
// mean equal rows.
//
//   bits 0 to 31    the row's last step (row_record.h); 0 if the key has no row
//   bit 32          whether the key has a row
//   bits 33 to 63   the epoch of the key's shard
//
// No stamp is 0, so a position with stamp 0 is always read again.
//
// Invariants, of each shard under its lock
//   1. Within an epoch, no row is removed, replaced or overwritten other than by the optimizer. So
//      a key without a row may get one, and a row stays its key's own.
//   2. Within an epoch, the last step of a row never decreases, and every update increases it.
//   3. No two epochs have the same number, whatever their shards and tables. So no stamp of a table
//      equals one of a table that has taken its place, which may have another seed.
//
// Why equal stamps mean equal rows
//   A stamp and its row are read at one moment, under the shard's lock. If two stamps of a key are
//   equal, they are of one epoch (3). If both have no row, both reads got the initial row, a pure
//   function of the seed and the key. If both have a row, it is the same one (1), and an update in
//   between would have increased its last step, which nothing decreases (2).
//   A key that had no row at the peek and gets one in the very lookup that rereads it needs no copy
//   either: its new row holds the initial row that the peek returned, rounded alike if rows are
//   half (rows.h).
//
// How the invariants are kept
//   Passes that remove or overwrite rows (removal, eviction, import, clearing, restoring a
//   snapshot) end the epoch. The rest keeps order by itself as long as batches follow one another:
//   the step only grows, an update takes a step of its own, and a lookup sets the step of the
//   latest update. Two cases break the order. Of two batches that run at the same time, one may
//   write a later step to a row before the other writes an earlier or equal one; and a row may be
//   imported with a step that the table hasn't reached. Both show when the step is written, since
//   the old one is then too large, and end the epoch.
//
// Cost
//   A stamp costs a peek no memory access, because a row's last step lies before its weights. A
//   reread of an unchanged row reads only the record's header, which its touch writes anyway. An
//   update of other rows leaves a row's stamp as it is. The end of an epoch makes one batch read
//   the rows of one shard again.
//
// Epochs are numbered through the whole process, modulo 2^31. A number repeats after two billion
// passes that end one: after days, if there are thousands of them in a second. A stamp is meant to
// be used a step or two later.

#ifndef GMETA_OPS_TABLE_CORE_STAMP_H_
#define GMETA_OPS_TABLE_CORE_STAMP_H_

#include <atomic>
#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta {

// The stamp of a key that has a row.
GMETA_HOST_DEVICE inline int64_t RowStamp(uint32_t epoch, uint32_t last_step) {
  return static_cast<int64_t>(uint64_t{epoch} << 33 | uint64_t{1} << 32 | last_step);
}

// The stamp of a key that has none.
GMETA_HOST_DEVICE inline int64_t MissingStamp(uint32_t epoch) {
  return static_cast<int64_t>(uint64_t{epoch} << 33);
}

// The present epoch of a shard. Not thread-safe: the shard has the lock.
class Epoch {
 public:
  uint32_t number() const { return number_; }

  // Ends the epoch. Call this in a pass that breaks an invariant, before the lock is released.
  void End() { number_ = Next(); }

  // Notes that a row's last step changes from `before` to `after`, and whether its content changes.
  void NoteStep(uint32_t before, uint32_t after, bool content) {
    if (before > after || (content && before == after)) End();
  }

 private:
  static uint32_t Next() {
    static std::atomic<uint32_t> count{0};
    for (;;) {
      const uint32_t number = ++count & ((uint32_t{1} << 31) - 1);
      if (number != 0) return number;
    }
  }

  uint32_t number_ = Next();
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_STAMP_H_
