// A row that a kernel has found: on disk, or one that is to go there (disk.cuh).

#ifndef GMETA_OPS_TABLE_GPU_TIERS_FOUND_ROW_H_
#define GMETA_OPS_TABLE_GPU_TIERS_FOUND_ROW_H_

#include <cstdint>

namespace gmeta {

struct FoundRow {
  int64_t key;
  uint32_t row;
  uint32_t at;  // in a list of numbers
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TIERS_FOUND_ROW_H_
