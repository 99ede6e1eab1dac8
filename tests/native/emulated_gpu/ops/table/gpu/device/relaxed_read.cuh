// In place of ops/table/gpu/device/relaxed_read.cuh: nothing comes between a thread's accesses
// here.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_

#include <cstdint>
#include <cstring>

namespace gmeta {

inline void ReadRelaxed(const void* from, uint64_t* low, uint64_t* high) {
  std::memcpy(low, from, sizeof *low);
  std::memcpy(high, static_cast<const char*>(from) + sizeof *low, sizeof *high);
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_
