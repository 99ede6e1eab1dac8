// Rows: the records of a shard by row number, in one of two forms with one interface.
//
//   FullRows   every record in float32 (row_record.h).
//   MixedRows  after MTGenRec, appendix C: a row with a frequency below a threshold has its weights
//              in float16 and its optimizer slots in bfloat16; the lookup that brings its frequency
//              to the threshold promotes it to float32, until it cools down, if rows do
//              (half_rule.h). Most rows of a recommender are rare, so most records are half as
//              large.
//
// In MixedRows, half and full records are in separate stores but share one number space
// (half_rule.h), so a change of precision changes a row's number. Touch, Refit and Cool return the
// new number, which the caller writes to the index. A number that IsHalf may be stale after other
// rows were touched. An optimizer step of a half row converts the row to float32, computes there,
// and rounds the result back (half_rounding.h). Slots are bfloat16 because they need range more
// than digits: a squared gradient of 1e-8 would be 0 in float16, and dividing by it would blow the
// row up.
//
// Passes are compiled for each form, so a table with one precision pays nothing.
//
// Thread safety: const methods may run concurrently; all others need exclusive access.

#ifndef GMETA_OPS_TABLE_HOST_ROWS_H_
#define GMETA_OPS_TABLE_HOST_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <variant>
#include <vector>

#include "ops/common/halves/half.h"
#include "ops/common/prefetch.h"
#include "ops/table/core/half_rounding.h"
#include "ops/table/core/half_rule.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/sweep_schedule.h"
#include "ops/table/host/row_store.h"

namespace gmeta {

// The memory of a table's records, full and half; the arena of an unused form stays empty.
struct RowArenas {
  explicit RowArenas(const RowLayout& layout)
      : full(layout.bytes()), half(HalfLayout(layout).bytes()) {}

  size_t bytes() const { return full.bytes() + half.bytes(); }

  ChunkArena full;
  ChunkArena half;
};

class FullRows {
 public:
  FullRows(const RowLayout& layout, RowArenas* arenas, uint64_t most_rows)
      : layout_(layout), store_(layout.bytes(), &arenas->full, most_rows) {}

  char* record(uint32_t row) const { return store_[row]; }

  RowHeader* header(uint32_t row) const { return RowLayout::header(store_[row]); }

  // Returns the number of a row with arbitrary content, which the caller writes: of the precision
  // that a row with this header has at a step of the table.
  uint32_t Allocate(RowHeader /*header*/, uint32_t /*step*/) { return store_.Allocate(); }
  // The same, of a form.
  uint32_t AllocateForm(bool /*half*/) { return store_.Allocate(); }
  void Free(uint32_t row) { store_.Free(row); }
  void Clear() { store_.Clear(); }

  // Whether a row with this header is to be half at a step of the table.
  bool IsToBeHalf(RowHeader /*header*/, uint32_t /*step*/) const { return false; }
  bool IsHalf(uint32_t /*row*/) const { return false; }

  // Records a use in the row's header. Returns the number that the row has from now on.
  uint32_t Touch(uint32_t row, uint32_t step, bool moves) {
    header(row)->Touch(step, moves);
    return row;
  }
  // Makes a half row full if it is no longer to be half, and a full row half. Return the number
  // that the row has from now on.
  uint32_t Refit(uint32_t row, uint32_t /*step*/) { return row; }
  uint32_t Cool(uint32_t row) { return row; }

  // Calls visit(weights, slots), which changes the row of a key through float32 pointers: a step of
  // the optimizer.
  template <class Visit>
  void Change(uint32_t row, int64_t /*key*/, uint32_t /*step*/, const Visit& visit) {
    Write(row, visit);
  }
  // Calls visit(weights, slots), which overwrites the row without reading it.
  template <class Visit>
  void Write(uint32_t row, const Visit& visit) {
    visit(RowLayout::weights(store_[row]), layout_.slots(store_[row]));
  }

  void CopyWeights(uint32_t row, float* to) const { WeightsOf(store_[row], false, to); }
  void CopySlots(uint32_t row, float* to) const { SlotsOf(store_[row], false, to); }
  // The same, of any record of this table.
  void WeightsOf(char* record, bool /*half*/, float* to) const {
    std::memcpy(to, RowLayout::weights(record), sizeof(float) * layout_.dim());
  }
  void SlotsOf(char* record, bool /*half*/, float* to) const {
    std::copy_n(layout_.slots(record), layout_.slot_floats(), to);
  }

  // Rounds weights in place as storing them in a new row does.
  void Round(float* /*weights*/) const {}

  // Rows on disk would be read here (tiered_rows.h).
  template <class Item>
  void Load(const Item* /*items*/, size_t /*n*/) const {}

  void PrefetchHeader(uint32_t row) const { Prefetch<Intent::kWrite>(store_[row]); }
  void PrefetchWeights(uint32_t row) const {
    PrefetchBytes<Intent::kRead>(store_[row], layout_.weights_end());
  }
  template <Intent kIntent>
  void PrefetchRecord(uint32_t row) const {
    PrefetchBytes<kIntent>(store_[row], layout_.bytes());
  }

  // Bytes of the records of all `rows` rows.
  uint64_t bytes(uint64_t rows) const { return rows * layout_.bytes(); }
  uint64_t half_rows() const { return 0; }
  size_t directory_bytes() const { return store_.directory_bytes(); }

 private:
  const RowLayout layout_;
  RowStore store_;
};

class MixedRows {
 public:
  MixedRows(const RowLayout& layout, const HalfRule& rule, const SweepSchedule& sweeps,
            const HalfRounding& rounding, RowArenas* arenas, uint64_t most_rows)
      : layout_(layout),
        half_layout_(layout),
        rule_(rule),
        sweeps_(sweeps),
        rounding_(rounding),
        full_(layout.bytes(), &arenas->full, std::min<uint64_t>(most_rows, HalfRule::kHalf)),
        half_(half_layout_.bytes(), &arenas->half, std::min<uint64_t>(most_rows, HalfRule::kHalf)),
        scratch_(layout.dim() + layout.slot_floats()) {}

  RowHeader* header(uint32_t row) const { return RowLayout::header(record(row)); }

  char* record(uint32_t row) const {
    return IsHalf(row) ? half_[row & ~HalfRule::kHalf] : full_[row];
  }

  uint32_t Allocate(RowHeader header, uint32_t step) {
    return AllocateForm(IsToBeHalf(header, step));
  }
  uint32_t AllocateForm(bool half) {
    if (!half) return full_.Allocate();
    const uint32_t row = half_.Allocate() | HalfRule::kHalf;
    ++half_rows_;
    return row;
  }
  void Free(uint32_t row) {
    if (!IsHalf(row)) return full_.Free(row);
    half_.Free(row & ~HalfRule::kHalf);
    --half_rows_;
  }
  void Clear() {
    full_.Clear();
    half_.Clear();
    half_rows_ = 0;
  }

  bool IsToBeHalf(RowHeader header, uint32_t step) const {
    if (rule_.IsRare(header.frequency)) return true;
    return rule_.cools() && rule_.IsToBeHalf(header, sweeps_.Latest(step));
  }
  bool IsHalf(uint32_t row) const { return HalfRule::IsHalf(row); }

  uint32_t Touch(uint32_t row, uint32_t step, bool moves) {
    header(row)->Touch(step, moves);
    return Refit(row, step);
  }
  uint32_t Refit(uint32_t row, uint32_t step) {
    return IsHalf(row) && !IsToBeHalf(*header(row), step) ? Promote(row) : row;
  }
  uint32_t Cool(uint32_t row) {
    const uint32_t cooled = AllocateForm(true);
    *header(cooled) = *header(row);
    Write(cooled, [&](float* weights, float* slots) {
      CopyWeights(row, weights);
      CopySlots(row, slots);
    });
    Free(row);
    return cooled;
  }

  template <class Visit>
  void Change(uint32_t row, int64_t key, uint32_t step, const Visit& visit) {
    if (IsHalf(row)) {
      CopyWeights(row, scratch_.data());
      CopySlots(row, scratch_.data() + layout_.dim());
    }
    Store(row, rounding_, key, step, visit);
  }
  template <class Visit>
  void Write(uint32_t row, const Visit& visit) {
    Store(row, HalfRounding{}, 0, 0, visit);
  }

  void CopyWeights(uint32_t row, float* to) const { WeightsOf(record(row), IsHalf(row), to); }
  void CopySlots(uint32_t row, float* to) const { SlotsOf(record(row), IsHalf(row), to); }
  void WeightsOf(char* record, bool half, float* to) const {
    if (half) {
      FromHalves(HalfLayout::weights(record), layout_.dim(), to);
    } else {
      std::memcpy(to, RowLayout::weights(record), sizeof(float) * layout_.dim());
    }
  }
  void SlotsOf(char* record, bool half, float* to) const {
    if (half) {
      FromBfloats(half_layout_.slots(record), layout_.slot_floats(), to);
    } else {
      std::copy_n(layout_.slots(record), layout_.slot_floats(), to);
    }
  }

  void Round(float* weights) const {
    constexpr size_t kPiece = 64;
    uint16_t halves[kPiece];
    for (size_t i = 0; i < layout_.dim(); i += kPiece) {
      const size_t n = std::min(kPiece, layout_.dim() - i);
      ToHalves(weights + i, n, halves);
      FromHalves(halves, n, weights + i);
    }
  }

  template <class Item>
  void Load(const Item* /*items*/, size_t /*n*/) const {}

  void PrefetchHeader(uint32_t row) const { Prefetch<Intent::kWrite>(record(row)); }
  void PrefetchWeights(uint32_t row) const {
    PrefetchBytes<Intent::kRead>(record(row),
                                 IsHalf(row) ? half_layout_.weights_end() : layout_.weights_end());
  }
  template <Intent kIntent>
  void PrefetchRecord(uint32_t row) const {
    PrefetchBytes<kIntent>(record(row), IsHalf(row) ? half_layout_.bytes() : layout_.bytes());
  }

  uint64_t bytes(uint64_t rows) const {
    return (rows - half_rows_) * layout_.bytes() + half_rows_ * half_layout_.bytes();
  }
  uint64_t half_rows() const { return half_rows_; }
  size_t directory_bytes() const { return full_.directory_bytes() + half_.directory_bytes(); }

 private:
  template <class Visit>
  void Store(uint32_t row, const HalfRounding& rounding, int64_t key, uint32_t step,
             const Visit& visit) {
    if (!IsHalf(row)) {
      visit(RowLayout::weights(record(row)), layout_.slots(record(row)));
      return;
    }
    float* slots = scratch_.data() + layout_.dim();
    visit(scratch_.data(), slots);
    rounding.Round(key, step, scratch_.data(), layout_.dim(), slots, layout_.slot_floats(),
                   HalfLayout::weights(record(row)), half_layout_.slots(record(row)));
  }

  uint32_t Promote(uint32_t row) {
    const uint32_t promoted = full_.Allocate();
    *header(promoted) = *header(row);
    CopyWeights(row, RowLayout::weights(record(promoted)));
    CopySlots(row, layout_.slots(record(promoted)));
    Free(row);
    return promoted;
  }

  const RowLayout layout_;
  const HalfLayout half_layout_;
  const HalfRule rule_;
  const SweepSchedule sweeps_;
  const HalfRounding rounding_;
  RowStore full_;
  RowStore half_;
  uint64_t half_rows_ = 0;
  std::vector<float> scratch_;  // one row in float32
};

using Rows = std::variant<FullRows, MixedRows>;

// Makes MixedRows if the rule has a threshold, else FullRows; for the shard with these sweeps.
// Numbers of rows, without HalfRule's flag, are below `most_rows`.
inline Rows MakeRows(const RowLayout& layout, const HalfRule& rule, const SweepSchedule& sweeps,
                     const HalfRounding& rounding, RowArenas* arenas, uint64_t most_rows) {
  if (rule.half_below == 0) return FullRows(layout, arenas, most_rows);
  return MixedRows(layout, rule, sweeps, rounding, arenas, most_rows);
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROWS_H_
