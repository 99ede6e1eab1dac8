// Whole records of a table as columns, which is how they are exported and imported.

#ifndef GMETA_OPS_HASH_TABLE_RECORD_COLUMNS_H_
#define GMETA_OPS_HASH_TABLE_RECORD_COLUMNS_H_

#include <cstdint>

namespace gmeta {

// Columns of whole records, for import (const) and export.
template <class Int, class Float>
struct BasicRecordColumns {
  Int* keys;
  Float* rows;   // dim floats a key
  Float* slots;  // slot_floats floats a key; null: an export leaves them out
  Int* frequency;
  Int* last_step;
};
using RecordColumns = BasicRecordColumns<int64_t, float>;
using ConstRecordColumns = BasicRecordColumns<const int64_t, const float>;

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TABLE_RECORD_COLUMNS_H_
