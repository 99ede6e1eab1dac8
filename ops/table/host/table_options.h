// TableOptions: what a table in host memory is made of, and what follows from it for its rows and
// its shards.

#ifndef GMETA_OPS_TABLE_HOST_TABLE_OPTIONS_H_
#define GMETA_OPS_TABLE_HOST_TABLE_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include "ops/table/core/optimizers.h"
#include "ops/table/host/row_recipe.h"

namespace gmeta {

struct TableOptions {
  size_t dim = 1;
  SparseOptimizer optimizer = Sgd{};
  Initializer initializer;
  Admission admission;               // admits all keys by default
  std::optional<Eviction> eviction;  // none by default
  HalfRule half{0};                  // which rows are in half precision; none by default
  bool round_at_random = false;      // steps of half rows; else to nearest
  RowPrior prior;                    // none by default
  std::optional<DiskTier> disk;      // none: all rows are in memory
  int log2_shards = 6;               // at most kLog2LogicalShards; fewer if the bound is small
};

inline RowRecipe MakeRecipe(const TableOptions& options) {
  return std::visit(
      [&](const auto& optimizer) {
        return RowRecipe{RowLayout(options.dim, optimizer.SlotFloats(options.dim)),
                         options.initializer,
                         optimizer.InitialSlot(),
                         options.admission,
                         options.eviction,
                         options.half,
                         {options.round_at_random, options.initializer.seed},
                         options.prior,
                         options.disk};
      },
      options.optimizer);
}

inline int Log2Shards(const TableOptions& options, const RowRecipe& recipe) {
  return options.eviction ? options.eviction->Log2Shards(options.log2_shards, recipe.layout.bytes())
                          : options.log2_shards;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_TABLE_OPTIONS_H_
