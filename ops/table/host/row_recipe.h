// RowRecipe: how rows are made and removed.

#ifndef GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_
#define GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_

#include <cstdint>
#include <optional>

#include "ops/table/core/admission.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/initializer.h"
#include "ops/table/core/row_prior.h"
#include "ops/table/core/row_record.h"

namespace gmeta {

// How rows are made and removed; the same for all shards of a table.
struct RowRecipe {
  RowLayout layout;
  Initializer initializer;
  float initial_slot;  // initial value of the first slot, at most dim floats; others start at 0
  Admission admission;
  std::optional<Eviction> eviction;
  uint32_t half_below;  // rows with a lower frequency are half; 0: no row is
  RowPrior prior;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_
