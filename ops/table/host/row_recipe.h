// RowRecipe: how rows are made and removed.

#ifndef GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_
#define GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "ops/table/core/admission.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/half_rounding.h"
#include "ops/table/core/half_rule.h"
#include "ops/table/core/initializer.h"
#include "ops/table/core/row_prior.h"
#include "ops/table/core/row_record.h"

namespace gmeta {

// Which of a table's rows are in memory, and where the others are.
struct DiskTier {
  std::string folder;         // for the files of rows
  uint64_t memory_bytes = 0;  // of rows in memory; beyond it, those unused for long move to disk
  size_t segment_bytes = size_t{256} << 10;  // of a write (record_log.h)
};

// How rows are made and removed; the same for all shards of a table.
struct RowRecipe {
  RowLayout layout;
  Initializer initializer;
  float initial_slot;  // initial value of the first slot, at most dim floats; others start at 0
  Admission admission;
  std::optional<Eviction> eviction;
  HalfRule half;  // with half_below 0, no row is half
  HalfRounding rounding;
  RowPrior prior;
  std::optional<DiskTier> disk;

  // Reads the row of a key that has none, rounded as storing it in `rows` does.
  template <class RowsOfShard>
  void ReadInitial(const RowsOfShard& rows, int64_t key, float* to) const {
    initializer.Fill(key, layout.dim(), to);
    rows.Round(to);
  }

  // Makes a row that nothing has used yet. Returns its number.
  template <class RowsOfShard>
  uint32_t MakeInitial(RowsOfShard* rows, int64_t key) const {
    const uint32_t row = rows->Allocate({0, 0}, 0);
    *rows->header(row) = {0, 0};
    rows->Write(row, [&](float* weights, float* slots) {
      initializer.Fill(key, layout.dim(), weights);
      const size_t first = std::min(layout.dim(), layout.slot_floats());
      slots = std::fill_n(slots, first, initial_slot);
      std::fill_n(slots, layout.slot_floats() - first, 0.0f);
    });
    return row;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_
