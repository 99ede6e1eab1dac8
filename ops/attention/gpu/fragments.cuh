// How a warpgroup loads its own tokens into registers and writes its sums, in both passes.
//
// Of 64 rows of numbers a thread holds those that wgmma.cuh names: rows r and r + 8, r = 16 (warp)
// + lane / 4.

#ifndef GMETA_OPS_ATTENTION_GPU_FRAGMENTS_CUH_
#define GMETA_OPS_ATTENTION_GPU_FRAGMENTS_CUH_

#include <cstdint>

#include "ops/hopper/hopper.cuh"
#include "ops/hopper/wgmma.cuh"

namespace gmeta::hstu {

__device__ __forceinline__ int OwnRow() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// Loads the warp's 16 rows of 64 in shared memory, in boxes of kBoxBytes, as the left operand of
// products: 4 registers for each 16 places of the sum.
template <int kBoxBytes, int kSize>
__device__ __forceinline__ void LoadLeft(const void* tile, uint32_t (&left)[kSize]) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    const int unit = 2 * (i % 4) + lane / 16;  // unit of 16 bytes; the swizzle moves it
    const char* from =
        static_cast<const char*>(tile) + i / 4 * kBoxBytes + row * 128 + ((unit ^ (row % 8)) * 16);
    hopper::LoadMatrices(from, left + 4 * i);
  }
}

// Before: each of four neighbouring threads q has word q of four units of 16 bytes. After: all of
// unit q.
__device__ __forceinline__ void TransposeWords(uint32_t (&words)[4]) {
#pragma unroll
  for (int by = 1; by <= 2; by *= 2) {
    const bool upper = threadIdx.x & by;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & by) continue;
      uint32_t &low = words[i], &high = words[i + by];
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, by);
      (upper ? low : high) = other;
    }
  }
}

// Where the sums of 64 own tokens go.
struct OwnPlace {
  int token;   // first token of the sequence
  int length;  // length of the sequence
  int row;     // place of the first own token in the sequence
  int head;
};

// Writes the sums of 64 own tokens, times a factor for each of a thread's two rows, and rounded.
// Four threads write 64 neighbouring bytes of a row. Tokens past the sequence's end are not
// written.
template <class T, int kSize>
__device__ __forceinline__ void StoreSums(const float (&sums)[kSize], float2 factors,
                                          const OwnPlace& own, T* to, int64_t stride) {
  constexpr int kWidth = 2 * kSize;
  const int row = own.row + OwnRow();
  T* const at = to + (static_cast<int64_t>(own.token) + row) * stride +
                static_cast<int64_t>(own.head) * kWidth + threadIdx.x % 4 * 8;
#pragma unroll
  for (int of_row = 0; of_row < 2; ++of_row) {
    const float factor = of_row == 0 ? factors.x : factors.y;
#pragma unroll
    for (int column = 0; column < kWidth; column += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = sums + (column / 8 + i) * 4 + 2 * of_row;
        words[i] = hopper::RoundedPair<T>(factor * two[0], factor * two[1]);
      }
      TransposeWords(words);
      if (row + 8 * of_row < own.length) {
        *reinterpret_cast<uint4*>(at + 8 * of_row * stride + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

template <class T, int kSize>
__device__ __forceinline__ void StoreSums(const float (&sums)[kSize], float factor,
                                          const OwnPlace& own, T* to, int64_t stride) {
  StoreSums<T>(sums, make_float2(factor, factor), own, to, stride);
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_FRAGMENTS_CUH_
