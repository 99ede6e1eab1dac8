// wgmma: products of tiles by a warpgroup of four warps, 64 rows at a time, in float32.
//
//   d (64, N) = a (64, 16) b (16, N) [+ d]
//
// `a` lies in shared memory or in registers, `b` in shared memory, d in registers. Thread t of the
// warpgroup holds part of row 16 (t / 32) + (t % 32) / 4: the columns 8 j + 2 (t % 4) + {0, 1} are
// in d[4 j + {0, 1}], and the same columns of the row 8 below are in d[4 j + {2, 3}]. For `a` in
// registers, the same thread holds, of 16 columns, those of its d for j = 0 and 1. So rounded
// scores can be the next `a` without being moved (`RoundedPair`).
//
// Tiles in shared memory are as the copy engine leaves them with a swizzle of 128 bytes: boxes of
// 64 numbers a row, rows one after another, each box at a multiple of 1,024 bytes. In a tile whose
// rows hold the places of the sum ("K-major" in PTX), 16 places are 32 bytes of a box. In the same
// tile transposed ("MN-major"), the places of the sum are rows: 16 places are 16 rows.
//
// Products (wgmma_instructions.cuh) run asynchronously. Commit closes a group of them. Wait<n>
// returns when all groups but the last n are done. Until then their registers belong to the
// hardware; Keep declares that to the compiler. hardware, which Keep tells the compiler.

#ifndef GMETA_OPS_HOPPER_WGMMA_CUH_
#define GMETA_OPS_HOPPER_WGMMA_CUH_

#include <cstdint>

#include "ops/hopper/hopper.cuh"
#include "ops/hopper/wgmma_instructions.cuh"

namespace gmeta::hopper {

inline constexpr int kBoxWidth = 64;  // numbers in a row of a box: 128 bytes

// Returns the description of a tile in shared memory for wgmma. `stride` is the distance from one
// box to the next, in bytes, and matters only for transposed tiles that are wider than a box.
__device__ __forceinline__ uint64_t Describe(const void* tile, uint32_t stride = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (static_cast<uint64_t>(stride >> 4) << 16) |
         ((SharedAddress(tile) & 0x3FFFF) >> 4);
}
// Returns the description of the memory `bytes` further on.
__device__ __forceinline__ uint64_t Advance(uint64_t description, uint32_t bytes) {
  return description + (bytes >> 4);
}
// Does the same, but keeps the high half constant. Which of the two leaves more registers differs
// from kernel to kernel: see what the compiler reports about spills.
__device__ __forceinline__ uint64_t AdvanceLow(uint64_t description, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(description) + (bytes >> 4);
  return (description & ~uint64_t{0xFFFFFFFF}) | low;
}
inline constexpr uint32_t kNextColumns = 32;     // 16 places of the sum, K-major
inline constexpr uint32_t kNextRows = 16 * 128;  // the same, for a transposed tile

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_WGMMA_CUH_
