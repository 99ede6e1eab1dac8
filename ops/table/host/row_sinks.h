// Sinks: where a pass that reads rows puts them.
//
// A pass (shard.h) finds the row of each position and has all effects on it. A sink decides which
// rows are copied, and where to:
//   AllRows      every row: a lookup
//   StampedRows  every row, and its stamp: a peek
//   ChangedRows  the rows whose stamp isn't that of an earlier peek: a reread
// So a reread is a lookup with another sink. Passes are compiled for each sink; AllRows reads no
// stamp.
//
// A sink has
//   bool Wants(uint32_t position, int64_t stamp) const;   whether the row is to be copied; called
//                                                         once for each position, before the pass
//                                                         changes the row
//   float* place(uint32_t position) const;                where to
//   void Prefetch(rows, position, row) const;             for the two above; row may be kNoRow
// Positions are distinct, so workers may share a sink.

#ifndef GMETA_OPS_TABLE_HOST_ROW_SINKS_H_
#define GMETA_OPS_TABLE_HOST_ROW_SINKS_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/prefetch.h"
#include "ops/table/core/index/key_index.h"

namespace gmeta {

class AllRows {
 public:
  // Row number i goes to out + i * dim.
  AllRows(float* out, size_t dim) : out_(out), dim_(dim) {}

  float* place(uint32_t position) const { return out_ + position * dim_; }
  bool Wants(uint32_t /*position*/, int64_t /*stamp*/) const { return true; }

  template <class RowsOfShard>
  void Prefetch(const RowsOfShard& rows, uint32_t position, uint32_t row) const {
    PrefetchBytes<Intent::kWrite>(place(position), sizeof(float) * dim_);
    if (row != kNoRow) rows.PrefetchWeights(row);
  }

 private:
  float* out_;
  size_t dim_;
};

class StampedRows : public AllRows {
 public:
  // Stamp number i goes to stamps[i].
  StampedRows(float* out, size_t dim, int64_t* stamps) : AllRows(out, dim), stamps_(stamps) {}

  bool Wants(uint32_t position, int64_t stamp) const {
    stamps_[position] = stamp;
    return true;
  }

 private:
  int64_t* stamps_;
};

class ChangedRows {
 public:
  // `rows` has what a peek returned, with these stamps.
  ChangedRows(float* rows, size_t dim, const int64_t* stamps)
      : rows_(rows), dim_(dim), stamps_(stamps) {}

  float* place(uint32_t position) const { return rows_ + position * dim_; }
  bool Wants(uint32_t position, int64_t stamp) const { return stamps_[position] != stamp; }

  // Most rows haven't changed, so only the header is read.
  template <class RowsOfShard>
  void Prefetch(const RowsOfShard& rows, uint32_t position, uint32_t row) const {
    gmeta::Prefetch(stamps_ + position);
    if (row != kNoRow) rows.PrefetchHeader(row);
  }

 private:
  float* rows_;
  size_t dim_;
  const int64_t* stamps_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_SINKS_H_
