// Which rows of a table of two precisions are half, and how rows are numbered: the same in host
// memory (rows.h) and on a GPU (ops/table/gpu/device/mixed_rows.cuh).
//
// Half and full records are in stores of their own, behind one number space: a row number with the
// top bit set is a half record's. So the form of a row is known before its record is read, and a
// row that is promoted changes its number.

#ifndef GMETA_OPS_TABLE_CORE_HALF_RULE_H_
#define GMETA_OPS_TABLE_CORE_HALF_RULE_H_

#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta {

struct HalfRule {
  static constexpr uint32_t kHalf = uint32_t{1} << 31;  // marks the number of a half row

  uint32_t half_below;  // rows of a frequency below it are half

  GMETA_HOST_DEVICE static bool IsHalf(uint32_t row) { return (row & kHalf) != 0; }

  // Whether a row of a frequency is to be half.
  GMETA_HOST_DEVICE bool IsRare(uint32_t frequency) const { return frequency < half_below; }

  // Whether a row may go on under its number at a frequency.
  GMETA_HOST_DEVICE bool Fits(uint32_t row, uint32_t frequency) const {
    return IsHalf(row) == IsRare(frequency);
  }

  // Whether so many uses, which came one after another to a frequency of `before`, have made a rare
  // row one that isn't. Of all that add to a row's frequency, this is true for one.
  GMETA_HOST_DEVICE bool EndsRarity(uint32_t before, uint32_t uses) const {
    return IsRare(before) && uses >= half_below - before;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_HALF_RULE_H_
