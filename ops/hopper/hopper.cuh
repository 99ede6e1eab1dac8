// Wrappers of Hopper's own instructions (sm_90a) for attention and products, one function each:
// shared memory barriers, the bulk copy engine (TMA), registers passed from warps to warps, named
// barriers.
//
// The names are PTX's. The PTX ISA describes what they do, in sections 9.7.9 (copies), 9.7.13
// (barriers) and 9.7.19 (setmaxnreg); the comments here state what callers must know.

#ifndef GMETA_OPS_HOPPER_HOPPER_CUH_
#define GMETA_OPS_HOPPER_HOPPER_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

// Whether this compiler pass may use them. In other passes kernels are empty.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GMETA_SM90A 1
#else
#define GMETA_SM90A 0
#endif

namespace gmeta::hopper {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

inline constexpr int kMaxSharedBytes = 227 * 1024;  // per block

// Returns the launch's shared memory, at a multiple of 1,024 bytes, as swizzled boxes require.
__device__ __forceinline__ char* SharedMemory() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// A warp arrives at a barrier through one of its threads: __syncwarp first orders what all have
// done. compute-sanitizer's racecheck doesn't follow that, and reports the other threads' accesses
// as races. In a build for it, with GMETA_EVERY_LANE_ARRIVES, all of them arrive.
#if defined(GMETA_EVERY_LANE_ARRIVES)
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

// A barrier in shared memory. It has phases 0, 1, 0, ...: a phase ends when `arrivals` threads have
// arrived and all announced bytes have come. Wait(p) returns when phase p has ended. So a consumer
// first waits for 0, and a producer, who finds everything free, for 1.
class Barrier {
 public:
  __device__ __forceinline__ void Init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals));
  }

  __device__ __forceinline__ void Arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives, and announces bytes that the copy engine will bring.
  __device__ __forceinline__ void ArriveExpecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  // Lets a warp arrive. All its threads call it; one arrives for them, or all (kWarpArrivals).
  __device__ __forceinline__ void ArriveAsWarp() {
    __syncwarp();
    if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) Arrive();
  }
  __device__ __forceinline__ void ArriveAsWarpExpecting(uint32_t bytes) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ArriveExpecting(bytes);
    } else if (kWarpArrivals > 1) {
      Arrive();
    }
  }

  __device__ __forceinline__ void Wait(uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra AGAIN;\n"
        "DONE:\n"
        "}\n" ::"r"(address()),
        "r"(phase)
        : "memory");
  }

  __device__ __forceinline__ uint32_t address() const { return SharedAddress(this); }

 private:
  uint64_t state_;
};

// Makes the barriers' initial state visible. The thread that called Init calls this after it and
// before a __syncthreads.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes earlier ordinary writes to shared memory visible to the copy engine and to wgmma. Each
// writing thread calls it, before the barrier that announces the writes.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies the box of a tensor (d, heads, tokens) at these coordinates to shared memory. One thread
// calls it.
__device__ __forceinline__ void CopyBox(const CUtensorMap* map, void* to, Barrier* done, int d,
                                        int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(done->address()), "r"(d), "r"(head), "r"(token)
      : "memory");
}

// Copies bytes, a multiple of 16 and aligned to 16, to shared memory. One thread calls it.
__device__ __forceinline__ void CopyBytes(void* to, const void* from, uint32_t bytes,
                                          Barrier* done) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(done->address())
      : "memory");
}

// Copies a box from shared memory to the tensor, in a group of copies of its own. Parts outside of
// the tensor aren't written. Each thread that wrote the box calls FenceAsyncProxy before. One
// thread calls it.
__device__ __forceinline__ void SendBox(const CUtensorMap* map, const void* from, int d, int head,
                                        int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(SharedAddress(from)), "r"(d), "r"(head), "r"(token)
      : "memory");
}

// Waits until all boxes that the thread has sent, except the last kBoxes, have been read, so that
// their memory may be overwritten. A block must not end before.
template <int kBoxes>
__device__ __forceinline__ void AwaitReadBoxes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kBoxes) : "memory");
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Sets the number of a warpgroup's registers. All its warps call it, at the very start of their
// branch.
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
#if GMETA_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
#if GMETA_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Waits at one of the block's 16 barriers of threads (0 is __syncthreads'), for `threads` threads
// in all, including those that only arrived.
__device__ __forceinline__ void NamedSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Loads four matrices of 8 by 8 numbers of 16 bits. Lanes 0 to 7, 8 to 15, ... point to their rows.
// A lane gets two neighbours of each matrix, those that wgmma takes for a left operand. A warp
// calls it.
__device__ __forceinline__ void LoadMatrices(const void* row, uint32_t* words) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(SharedAddress(row))
               : "memory");
}

// The inverse: stores what LoadMatrices would load from there.
__device__ __forceinline__ void StoreMatrices(void* row, const uint32_t* words) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// The special function unit's results, on any GPU: 2^x, log2 x and 1 / x to about 2^-22, tanh to
// about 2^-11.
__device__ __forceinline__ float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float FastLog2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float FastReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float FastTanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_HOPPER_CUH_
