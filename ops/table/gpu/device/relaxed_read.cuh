// A read of 16 bytes. It is written in PTX and therefore has a file of its own
// (tests/native/emulated_gpu).

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_

#include <cstdint>

namespace gmeta {

// Reads 16 bytes, as they are at one moment, even if others write them meanwhile. The address must
// be aligned to 16 bytes.
__device__ inline void ReadRelaxed(const void* from, uint64_t* low, uint64_t* high) {
  asm volatile(
      "{\n .reg .b128 whole;\n ld.relaxed.gpu.global.b128 whole, [%2];\n"
      " mov.b128 {%0, %1}, whole;\n}"
      : "=l"(*low), "=l"(*high)
      : "l"(from)
      : "memory");
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_
