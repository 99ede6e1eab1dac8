// When the shards of a table are swept: each once in a fixed number of steps, at the end of an
// update, and the turns of the shards are spread evenly over these steps. Sweeps by a clock have
// kTurns turns, which are spread evenly over a fixed time (step_times.h).
//
// A turn depends on the step alone, so a restored table sweeps at the same steps as one that was
// never interrupted.

#ifndef GMETA_OPS_TABLE_CORE_SWEEP_SCHEDULE_H_
#define GMETA_OPS_TABLE_CORE_SWEEP_SCHEDULE_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta {

class SweepSchedule {
 public:
  SweepSchedule() = default;  // never
  // Of a shard out of `shards`, every `steps` steps (0: never).
  GMETA_HOST_DEVICE SweepSchedule(uint64_t steps, uint64_t shard, uint64_t shards)
      : steps_(steps), offset_(steps * shard / shards) {}

  GMETA_HOST_DEVICE bool IsDue(uint64_t step) const {
    return steps_ != 0 && (step + offset_) % steps_ == 0;
  }

  // Returns the step of the latest sweep up to `step`; 0: there was none.
  GMETA_HOST_DEVICE uint64_t Latest(uint64_t step) const {
    if (steps_ == 0) return 0;
    const uint64_t since = (step + offset_) % steps_;
    return since < step ? step - since : 0;
  }

 private:
  uint64_t steps_ = 0;
  uint64_t offset_ = 0;
};

constexpr int64_t kTurns = 64;

// Whether a shard's turn is one of `turns`, a bit each. A table has 1, 2, 4, ... or kTurns shards.
inline bool IsTurnOf(size_t shard, size_t shards, uint64_t turns) {
  return (turns >> (shard * (kTurns / shards)) & 1) != 0;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_SWEEP_SCHEDULE_H_
