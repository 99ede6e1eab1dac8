// A stage of a ring of buffers, and the parity of its current turn.

#ifndef GMETA_OPS_HOPPER_TURN_CUH_
#define GMETA_OPS_HOPPER_TURN_CUH_

#include <cstdint>

namespace gmeta::hopper {

struct Turn {
  int stage = 0;
  uint32_t phase = 0;
  template <int kStages>
  __device__ __forceinline__ void Next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_TURN_CUH_
