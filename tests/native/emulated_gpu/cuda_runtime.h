// CUDA's language and runtime as far as the emulated kernels use them (emulation.h).

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_RUNTIME_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulation.h"

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// Blocks run one after another, so that a static is a block's own while it runs; what is `extern`
// is defined by EMULATED_SHARED.
#define __shared__ static

#define threadIdx (::emulated::Current().fiber->index)
#define blockIdx (::emulated::Current().block_index)
#define blockDim (::emulated::Current().block_size)
#define gridDim (::emulated::Current().grid_size)

using std::fmaf;
using std::max;
using std::min;

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) {
    found |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return found;
}

inline void __syncthreads() {
  auto& block = emulated::Current();
  block.Meet(&block.all, static_cast<int>(block.block_size.x));
}
inline void __syncwarp() { emulated::Current().MeetWarp(); }

template <class T>
T ShuffledFrom(T x, int lane) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof(x));
  word = emulated::Current().Exchange(word)[lane];
  std::memcpy(&x, &word, sizeof(x));
  return x;
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return ShuffledFrom(x, lane % 32);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int by) {
  return ShuffledFrom(x, emulated::Current().lane() ^ by);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = emulated::Current().lane();
  return ShuffledFrom(x, lane < by ? lane : lane - by);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  const int lane = emulated::Current().lane();
  return ShuffledFrom(x, lane + by > 31 ? lane : lane + by);
}
inline unsigned __ballot_sync(unsigned, int x) {
  const uint64_t* words = emulated::Current().Exchange(x != 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(words[i]) << i;
  return bits;
}
inline int __all_sync(unsigned lanes, int x) { return __ballot_sync(lanes, x) == lanes; }
template <class T, class Reduce>
T OfWarp(T x, const Reduce& reduce) {
  const uint64_t* words = emulated::Current().Exchange(static_cast<uint32_t>(x));
  for (int i = 0; i < 32; ++i) x = reduce(x, static_cast<T>(static_cast<uint32_t>(words[i])));
  return x;
}
inline int __reduce_min_sync(unsigned, int x) {
  return OfWarp(x, [](int a, int b) { return min(a, b); });
}
inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline int __reduce_max_sync(unsigned, int x) {
  return OfWarp(x, [](int a, int b) { return max(a, b); });
}
inline int __syncthreads_or(int x) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= x;
  __syncthreads();
  return any;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
template <class T>
T __ldg(const T* from) {
  return *from;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline int __double2hiint(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<int>(bits >> 32);
}
inline double __hiloint2double(int upper, int lower) {
  const uint64_t bits = uint64_t{static_cast<unsigned>(upper)} << 32 | static_cast<unsigned>(lower);
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
template <class T>
T atomicAdd(T* to, T by) {
  const T before = *to;
  *to += by;
  return before;
}

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorUnknown };
// A stream has done all at once (null), or does it late: when somebody waits for it.
struct EmulatedStream {
  std::deque<std::function<void()>> waiting;
  uint64_t done = 0;

  uint64_t sent() const { return done + waiting.size(); }
  void RunUntil(uint64_t count) {
    for (; done < count; ++done) {
      waiting.front()();
      waiting.pop_front();
    }
  }
};
using cudaStream_t = EmulatedStream*;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  std::memset(to, byte, bytes);
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : emulated::settings.multiprocessors;
  return cudaSuccess;
}

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_RUNTIME_H_
