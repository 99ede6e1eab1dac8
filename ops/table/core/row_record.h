// One row of a table, in one piece of memory:
//
//   offset 0   uint32  frequency   how many inserting lookups have read the row (saturating)
//   offset 4   uint32  last step   the table's step at the latest such lookup or update; with a
//                                  prior (row_prior.h), at the insertion or the latest update
//   offset 8   float32 weights[dim]
//              float32 slots[slot_floats]   the row's optimizer state
//
// A half record, in tables that mix two precisions (rows.h), has the same header, then
//   offset 8   float16 weights[dim]
//              bfloat16 slots[slot_floats]
// and is padded to whole words.
//
// A row's weights, its optimizer state and the metadata that admission and eviction read are made
// and removed together, and a training step that uses a row touches one run of cache lines. A
// record holds no key: keys are in the key index, so that growing the index moves no record.

#ifndef GMETA_OPS_TABLE_CORE_ROW_RECORD_H_
#define GMETA_OPS_TABLE_CORE_ROW_RECORD_H_

#include <cstddef>
#include <cstdint>

namespace gmeta {

struct RowHeader {
  uint32_t frequency;
  uint32_t last_step;

  // Records a use. If `moves` is false, a later use than the first leaves the last step as it is.
  void Touch(uint32_t step, bool moves) {
    if (moves || frequency == 0) last_step = step;
    frequency += frequency != UINT32_MAX;
  }
};
static_assert(sizeof(RowHeader) == 8);

// The offsets of the parts of a record, from the row's widths.
class RowLayout {
 public:
  RowLayout(size_t dim, size_t slot_floats) : dim_(dim), slot_floats_(slot_floats) {}

  size_t dim() const { return dim_; }
  size_t slot_floats() const { return slot_floats_; }
  size_t bytes() const { return weights_end() + sizeof(float) * slot_floats_; }
  // Bytes of the header and the weights: the part that a lookup reads.
  size_t weights_end() const { return sizeof(RowHeader) + sizeof(float) * dim_; }

  static RowHeader* header(char* record) { return reinterpret_cast<RowHeader*>(record); }
  static float* weights(char* record) {
    return reinterpret_cast<float*>(record + sizeof(RowHeader));
  }
  float* slots(char* record) const { return weights(record) + dim_; }

 private:
  size_t dim_;
  size_t slot_floats_;
};

// The offsets of the parts of a half record.
class HalfLayout {
 public:
  explicit HalfLayout(const RowLayout& full) : dim_(full.dim()), slots_(full.slot_floats()) {}

  size_t bytes() const {
    const size_t end = weights_end() + sizeof(uint16_t) * slots_;
    return (end + alignof(RowHeader) - 1) / alignof(RowHeader) * alignof(RowHeader);
  }
  size_t weights_end() const { return sizeof(RowHeader) + sizeof(uint16_t) * dim_; }

  static uint16_t* weights(char* record) {
    return reinterpret_cast<uint16_t*>(record + sizeof(RowHeader));
  }
  uint16_t* slots(char* record) const { return weights(record) + dim_; }

 private:
  size_t dim_;
  size_t slots_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_ROW_RECORD_H_
