// TablePlace: a table and its rows of one form, as they are at a call that moves some of them.

#ifndef GMETA_OPS_TABLE_GPU_TIERS_TABLE_PLACE_H_
#define GMETA_OPS_TABLE_GPU_TIERS_TABLE_PLACE_H_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

struct TablePlace {
  IndexView index;
  RowsView rows;
  StorePools* pools;
  GpuCounters* counters;
  uint32_t step;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TIERS_TABLE_PLACE_H_
