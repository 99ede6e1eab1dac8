// Whole records of a table as columns, the form in which they are exported and imported.

#ifndef GMETA_OPS_TABLE_HOST_RECORD_COLUMNS_H_
#define GMETA_OPS_TABLE_HOST_RECORD_COLUMNS_H_

#include <cstdint>

namespace gmeta {

// Columns of whole records, for import (const) and export.
template <class Int, class Float>
struct BasicRecordColumns {
  Int* keys;
  Float* rows;   // dim floats per key
  Float* slots;  // slot_floats floats per key; if null, an export leaves them out
  Int* frequency;
  Int* last_step;
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
