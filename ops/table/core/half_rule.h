// The rule that decides which rows of a table of two precisions are half, and how rows are
// numbered. It is the same in host memory (rows.h) and on a GPU
// (ops/table/gpu/device/mixed_rows.cuh).
//
// Half records and full records are in separate stores but share one number space: a row number
// with the top bit set belongs to a half record. So the row number tells the precision before the
// record is read, and a promoted row gets a new number.

#ifndef GMETA_OPS_TABLE_CORE_HALF_RULE_H_
#define GMETA_OPS_TABLE_CORE_HALF_RULE_H_

#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta {

struct HalfRule {
  static constexpr uint32_t kHalf = uint32_t{1} << 31;  // marks the number of a half row

  uint32_t half_below;  // rows with a lower frequency are half

  GMETA_HOST_DEVICE static bool IsHalf(uint32_t row) { return (row & kHalf) != 0; }

  // Whether a row of this frequency is to be half.
  GMETA_HOST_DEVICE bool IsRare(uint32_t frequency) const { return frequency < half_below; }

  // Whether a row may keep its number at this frequency.
  GMETA_HOST_DEVICE bool Fits(uint32_t row, uint32_t frequency) const {
    return IsHalf(row) == IsRare(frequency);
  }

  // Whether adding `uses` to a frequency of `before` makes a rare row a frequent one. Among all
  // additions to a row's frequency, this is true for one.
  GMETA_HOST_DEVICE bool EndsRarity(uint32_t before, uint32_t uses) const {
    return IsRare(before) && uses >= half_below - before;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_HALF_RULE_H_
