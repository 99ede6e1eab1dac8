// The rule that decides which rows of a table of two precisions are half, and how rows are
// numbered. It is the same in host memory (rows.h) and on a GPU
// (ops/table/gpu/device/mixed_rows.cuh).
//
// Numbers
//   Half records and full records are in separate stores but share one number space: a row number
//   with the top bit set belongs to a half record. So the row number shows the precision before the
//   record is read, and a row that changes its precision gets a new number.
//
// The rule
//   A row is half while its frequency is below a threshold. With a half-life, frequent rows cool
//   down too. The effective frequency of a row that was last used n steps ago is
//
//     e = frequency * 2^-k * (1 - r / (2 * half_life))       n = k * half_life + r, r < half_life
//
//   It halves every half_life steps, along a line in between, so that it is compared in whole
//   numbers: equal on every machine. Each shard is swept every half_life / 8 steps
//   (sweep_schedule.h), and rows with 2 * e < threshold become half. A use brings e back to the
//   frequency, and the row back to full. So a row that has just reached the threshold stays full
//   for one half-life without use, and one with 2^m times the threshold for m + 1.
//
//   Sweeps round to nearest. So a row's precision and its numbers follow from its header, the
//   step, and the numbers that it had in full. A table that is restored from any of its saves,
//   including increments, which lack the rows that only a sweep has changed, continues as if it
//   hadn't been interrupted.

#ifndef GMETA_OPS_TABLE_CORE_HALF_RULE_H_
#define GMETA_OPS_TABLE_CORE_HALF_RULE_H_

#include <cstdint>

#include "ops/common/host_device.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/sweep_schedule.h"

namespace gmeta {

struct HalfRule {
  static constexpr uint32_t kHalf = uint32_t{1} << 31;     // marks the number of a half row
  static constexpr uint32_t kLongestHalfLife = kHalf - 1;  // so that products fit 64 bits

  uint32_t half_below;     // the threshold; rows with a lower frequency are half
  uint32_t half_life = 0;  // in steps, up to kLongestHalfLife; 0: no row cools down

  GMETA_HOST_DEVICE static bool IsHalf(uint32_t row) { return (row & kHalf) != 0; }

  GMETA_HOST_DEVICE bool cools() const { return half_below != 0 && half_life != 0; }
  // The sweeps of a shard out of `shards`.
  GMETA_HOST_DEVICE SweepSchedule Sweeps(uint64_t shard, uint64_t shards) const {
    const uint32_t steps = half_life / 8;
    return SweepSchedule(cools() && steps == 0 ? 1 : steps, shard, shards);
  }

  // Whether a row of this frequency is half even though it was just used.
  GMETA_HOST_DEVICE bool IsRare(uint32_t frequency) const { return frequency < half_below; }

  // Whether a row is to be half if its shard was last swept at a step.
  GMETA_HOST_DEVICE bool IsToBeHalf(RowHeader header, uint64_t swept) const {
    return IsRare(header.frequency) ||
           (cools() && swept > header.last_step && IsCold(header, swept - header.last_step));
  }

  // Whether adding `uses` to a frequency of `before` makes a rare row a frequent one. Among all
  // additions to a row's frequency, this is true for one.
  GMETA_HOST_DEVICE bool EndsRarity(uint32_t before, uint32_t uses) const {
    return IsRare(before) && uses >= half_below - before;
  }

 private:
  // Whether 2 * e < half_below after `idle` steps, both sides times 2^k * half_life.
  GMETA_HOST_DEVICE bool IsCold(RowHeader header, uint64_t idle) const {
    const uint64_t halvings = idle / half_life, rest = idle % half_life;
    const uint64_t scaled = header.frequency * (2 * uint64_t{half_life} - rest);
    return halvings >= 64 || scaled >> halvings < uint64_t{half_below} * half_life;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_HALF_RULE_H_
