// The instructions of wgmma.cuh: wgmma for all shapes and types that the kernels use, its fences,
// and the rounding of sums to the operands' types.

#ifndef GMETA_OPS_HOPPER_WGMMA_INSTRUCTIONS_CUH_
#define GMETA_OPS_HOPPER_WGMMA_INSTRUCTIONS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/hopper/hopper.cuh"

namespace gmeta::hopper {

// Call it before the first product that follows ordinary writes to its registers.
__device__ __forceinline__ void Begin() {
#if GMETA_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void Commit() {
#if GMETA_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int kGroups>
__device__ __forceinline__ void Wait() {
#if GMETA_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
#endif
}
template <size_t kSize>
__device__ __forceinline__ void Keep(float (&d)[kSize]) {
#pragma unroll
  for (size_t i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <size_t kSize>
__device__ __forceinline__ void Keep(uint32_t (&a)[kSize]) {
#pragma unroll
  for (size_t i = 0; i < kSize; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Rounds two neighbours of a row to T, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t RoundedPair(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// clang-format off
#define GMETA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GMETA_R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define GMETA_R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define GMETA_R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define GMETA_R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define GMETA_R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define GMETA_R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define GMETA_R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define GMETA_R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define GMETA_R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define GMETA_R80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define GMETA_R88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define GMETA_R96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define GMETA_R104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define GMETA_R112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define GMETA_R120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define GMETA_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define GMETA_REGISTERS_32 GMETA_R0 ", " GMETA_R8
#define GMETA_OUTPUTS_32 GMETA_D8(0), GMETA_D8(8)
#define GMETA_REGISTERS_64 GMETA_R0 ", " GMETA_R8 ", " GMETA_R16 ", " GMETA_R24
#define GMETA_OUTPUTS_64 GMETA_D8(0), GMETA_D8(8), GMETA_D8(16), GMETA_D8(24)
#define GMETA_REGISTERS_80 GMETA_R0 ", " GMETA_R8 ", " GMETA_R16 ", " GMETA_R24 ", " GMETA_R32
#define GMETA_OUTPUTS_80 GMETA_D8(0), GMETA_D8(8), GMETA_D8(16), GMETA_D8(24), GMETA_D8(32)
#define GMETA_REGISTERS_96 GMETA_R0 ", " GMETA_R8 ", " GMETA_R16 ", " GMETA_R24 ", " GMETA_R32 ", " GMETA_R40
#define GMETA_OUTPUTS_96 GMETA_D8(0), GMETA_D8(8), GMETA_D8(16), GMETA_D8(24), GMETA_D8(32), GMETA_D8(40)
#define GMETA_REGISTERS_128 GMETA_R0 ", " GMETA_R8 ", " GMETA_R16 ", " GMETA_R24 ", " GMETA_R32 ", " GMETA_R40 ", " GMETA_R48 ", " GMETA_R56
#define GMETA_OUTPUTS_128 GMETA_D8(0), GMETA_D8(8), GMETA_D8(16), GMETA_D8(24), GMETA_D8(32), GMETA_D8(40), GMETA_D8(48), GMETA_D8(56)
#define GMETA_REGISTERS_192 GMETA_R0 ", " GMETA_R8 ", " GMETA_R16 ", " GMETA_R24 ", " GMETA_R32 ", " GMETA_R40 ", " GMETA_R48 ", " GMETA_R56 ", " GMETA_R64 ", " GMETA_R72 ", " GMETA_R80 ", " GMETA_R88
#define GMETA_OUTPUTS_192 GMETA_D8(0), GMETA_D8(8), GMETA_D8(16), GMETA_D8(24), GMETA_D8(32), GMETA_D8(40), GMETA_D8(48), GMETA_D8(56), GMETA_D8(64), GMETA_D8(72), GMETA_D8(80), GMETA_D8(88)
#define GMETA_REGISTERS_256 GMETA_R0 ", " GMETA_R8 ", " GMETA_R16 ", " GMETA_R24 ", " GMETA_R32 ", " GMETA_R40 ", " GMETA_R48 ", " GMETA_R56 ", " GMETA_R64 ", " GMETA_R72 ", " GMETA_R80 ", " GMETA_R88 ", " GMETA_R96 ", " GMETA_R104 ", " GMETA_R112 ", " GMETA_R120
#define GMETA_OUTPUTS_256 GMETA_D8(0), GMETA_D8(8), GMETA_D8(16), GMETA_D8(24), GMETA_D8(32), GMETA_D8(40), GMETA_D8(48), GMETA_D8(56), GMETA_D8(64), GMETA_D8(72), GMETA_D8(80), GMETA_D8(88), GMETA_D8(96), GMETA_D8(104), GMETA_D8(112), GMETA_D8(120)

#define GMETA_WGMMA_SHARED(N, TYPE, A, B, ADD, TB) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" GMETA_REGISTERS_##N "}, %" #A ", %" #B ", p, 1, 1, 0, %" #TB ";\n}\n" \
               : GMETA_OUTPUTS_##N : "l"(a), "l"(b), "r"(add), "n"(kTransposed))
#define GMETA_WGMMA_REGISTERS(N, TYPE, A0, A1, A2, A3, B, ADD, TB) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" GMETA_REGISTERS_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TB ";\n}\n" \
               : GMETA_OUTPUTS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))
#if GMETA_SM90A
#define GMETA_WGMMA(N, A, B, ADD, TB, A0, A1, A2, A3, RB, RADD, RTB) \
  template <class T, int kTransposed> \
  __device__ __forceinline__ void Product(float (&d)[N / 2], uint64_t a, uint64_t b, int add) { \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) GMETA_WGMMA_SHARED(N, "bf16", A, B, ADD, TB); \
    else GMETA_WGMMA_SHARED(N, "f16", A, B, ADD, TB); \
  } \
  template <class T, int kTransposed> \
  __device__ __forceinline__ void Product(float (&d)[N / 2], const uint32_t* a, uint64_t b, int add) { \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) GMETA_WGMMA_REGISTERS(N, "bf16", A0, A1, A2, A3, RB, RADD, RTB); \
    else GMETA_WGMMA_REGISTERS(N, "f16", A0, A1, A2, A3, RB, RADD, RTB); \
  }
#else
#define GMETA_WGMMA(N, A, B, ADD, TB, A0, A1, A2, A3, RB, RADD, RTB) \
  template <class T, int kTransposed> \
  __device__ __forceinline__ void Product(float (&)[N / 2], uint64_t, uint64_t, int) {} \
  template <class T, int kTransposed> \
  __device__ __forceinline__ void Product(float (&)[N / 2], const uint32_t*, uint64_t, int) {}
#endif

// Product<T, kTransposed>(d, a, b, add) computes d (64, N) over 16 places of the sum. `a` is a
// description or 4 registers; `b` is a description, of a transposed tile if kTransposed is 1. If
// add is 0, d is replaced.
GMETA_WGMMA(32, 16, 17, 18, 19, 16, 17, 18, 19, 20, 21, 22)
GMETA_WGMMA(64, 32, 33, 34, 35, 32, 33, 34, 35, 36, 37, 38)
GMETA_WGMMA(80, 40, 41, 42, 43, 40, 41, 42, 43, 44, 45, 46)
GMETA_WGMMA(96, 48, 49, 50, 51, 48, 49, 50, 51, 52, 53, 54)
GMETA_WGMMA(128, 64, 65, 66, 67, 64, 65, 66, 67, 68, 69, 70)
GMETA_WGMMA(192, 96, 97, 98, 99, 96, 97, 98, 99, 100, 101, 102)
GMETA_WGMMA(256, 128, 129, 130, 131, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_WGMMA_INSTRUCTIONS_CUH_
