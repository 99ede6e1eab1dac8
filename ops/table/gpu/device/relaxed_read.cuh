// A read of 16 bytes that is PTX, and so in a file of its own (tests/native/emulated_gpu).

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_RELAXED_READ_CUH_

#include <cstdint>

namespace gmeta {

// 16 bytes at an address aligned to them, as they are at one moment, whoever writes them meanwhile.
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
