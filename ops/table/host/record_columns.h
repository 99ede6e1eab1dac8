// Whole records of a table as columns, the form in which they are exported and imported.

#ifndef GMETA_OPS_TABLE_HOST_RECORD_COLUMNS_H_
#define GMETA_OPS_TABLE_HOST_RECORD_COLUMNS_H_

#include <cstdint>

#include "ops/table/core/row_record.h"

namespace gmeta {

// Columns of whole records, for import (const) and export.
template <class Int, class Float>
struct BasicRecordColumns {
  Int* keys;
  Float* rows;   // dim floats per key
  Float* slots;  // slot_floats floats per key; if null, an export leaves them out
  Int* frequency;
  Int* last_step;

  // Writes row number `row` of a shard's rows to place `at`. For export only.
  template <class RowsOfShard>
  void Write(const RowLayout& layout, const RowsOfShard& from, int64_t key, uint32_t row,
             uint64_t at) const {
    keys[at] = key;
    frequency[at] = from.header(row)->frequency;
    last_step[at] = from.header(row)->last_step;
    from.CopyWeights(row, rows + at * layout.dim());
    if (slots != nullptr) from.CopySlots(row, slots + at * layout.slot_floats());
  }
};
using RecordColumns = BasicRecordColumns<int64_t, float>;
using ConstRecordColumns = BasicRecordColumns<const int64_t, const float>;

// The sizes of an export of logical shards.
struct ShardExportSizes {
  uint64_t rows;
  uint64_t removed;
  uint64_t waiting;
  int64_t step;
  bool journal_whole;  // `removed` is complete: the save may be an increment
};

// The output buffers of an export of logical shards. Splits have one entry more than there are
// logical shards, as in a ragged tensor.
struct ShardExportColumns {
  RecordColumns records;
  int64_t* row_splits;
  int64_t* removed;
  int64_t* removed_splits;
  int64_t* live;  // rows of each logical shard, saved or not
  int64_t* waiting;
  int64_t* waiting_counts;
  int64_t* waiting_splits;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_RECORD_COLUMNS_H_
