// RowRecipe: how rows are made and unmade.

#ifndef GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_
#define GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_

#include <cstdint>
#include <optional>

#include "ops/table/core/admission.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/initializer.h"
#include "ops/table/core/row_record.h"

namespace gmeta {

// How rows are made and unmade; the same for all shards of a table.
struct RowRecipe {
  RowLayout layout;
  Initializer initializer;
  float initial_slot;  // of the first slot, at most dim floats; the others start at 0
  Admission admission;
  std::optional<Eviction> eviction;
  uint32_t half_below;  // rows of a frequency below it are half; 0: none
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_RECIPE_H_
