// Shared by the launches of HSTU's attention: checks, tensor maps, the choice of a kernel.

#ifndef GMETA_OPS_ATTENTION_GPU_LAUNCH_CUH_
#define GMETA_OPS_ATTENTION_GPU_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/bias/bias.cuh"
#include "ops/attention/gpu/plan/strips.cuh"
#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/hopper/tensor_map.cuh"

namespace gmeta::hstu {

// Returns an attribute of the current device.
inline int Property(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

template <class T>
bool MapOf(CUtensorMap* map, const GmetaHstuAttention& a, const GmetaHeads& x, int rows) {
  return hopper::MakeTensorMap<T>(map, x.data, a.tokens, a.heads, a.width, x.stride, a.width, rows);
}

inline void CheckSupported(int32_t dtype, int32_t width) {
  const auto require = [](bool condition, const char* message) {
    if (!condition) throw CudaError(GMETA_CUDA_UNSUPPORTED, message);
  };
  require(dtype == GMETA_BFLOAT16 || dtype == GMETA_FLOAT16,
          "hstu attention: the GPU's kernels take bfloat16 and float16");
  require(width == 64 || width == 128 || width == 256,
          "hstu attention: the GPU's kernels take heads of width 64, 128 and 256");
  require(Property(cudaDevAttrComputeCapabilityMajor) == 9,
          "hstu attention: the GPU's kernels need compute capability 9.0 (H100, H200)");
}

// Returns the number of blocks to launch. One block fills a multiprocessor, so there is at most one
// for each.
inline int64_t PersistentBlocks(int64_t works) {
  return std::min<int64_t>(works, Property(cudaDevAttrMultiProcessorCount));
}

template <class Arguments>
void LaunchPersistent(void (*kernel)(Arguments), const Arguments& in, int64_t works, int threads,
                      int shared_bytes, cudaStream_t stream, const char* what) {
  gmeta::Launch(kernel, static_cast<unsigned>(PersistentBlocks(works)), threads, shared_bytes,
                stream, what, in);
}

// Returns whether weights come from scores, not from the bias alone.
inline bool IsScored(const GmetaHstuAttention& a) { return a.q.data != nullptr; }

// Returns alpha. A bias is divided by it, and softmax multiplies it by infinity, so with these a
// tiny number takes the place of 0, and 1 if there are no scores.
inline float AlphaOf(const GmetaHstuAttention& a) {
  if (!IsScored(a)) return 1.0f;
  if (a.softmax != nullptr) return std::max(a.alpha, 0x1p-100f);
  return a.bias == nullptr || a.alpha != 0.0f ? a.alpha : 0x1p-100f;
}

// Returns what the kernels need of an attention's bias; empty if there is none.
inline GpuBias BiasOf(const GmetaHstuAttention& a) {
  if (a.bias == nullptr) return {};
  const GmetaHstuBias& b = *a.bias;
  Require(b.positions == nullptr || (b.n > 0 && b.n < (int64_t{1} << 29)),
          "hstu attention: a bias of places has 2 n - 1 numbers, n from 1 to 2^29, got n = " +
              std::to_string(b.n));
  Require(b.time_buckets == nullptr || (b.buckets > 0 && b.buckets <= kMostBuckets),
          "hstu attention: a bias of times has from 1 to 256 buckets, got " +
              std::to_string(b.buckets));
  return {b.positions,
          static_cast<int>(b.n),
          b.time_buckets,
          b.buckets,
          b.time_buckets == nullptr ? nullptr : static_cast<const MapTile*>(b.time_map),
          1.0f / AlphaOf(a)};
}

// Calls launch(T, width, whether it is biased, whether it is scored) for an attention, if it has
// tokens and heads.
template <class Launch>
void Dispatch(const GmetaHstuAttention& a, const Launch& launch) {
  CheckSupported(a.dtype, a.width);
  if (a.tokens == 0 || a.heads == 0) return;
  const bool biased =
      a.bias != nullptr && (a.bias->positions != nullptr || a.bias->time_buckets != nullptr);
  Require(biased || IsScored(a), "hstu attention: without q and k there must be a bias");
  const auto of_type = [&](auto type, auto is_biased, auto is_scored) {
    const auto of_width = [&](auto width) { launch(type, width, is_biased, is_scored); };
    if (a.width == 64) return of_width(std::integral_constant<int, 64>());
    if (a.width == 128) return of_width(std::integral_constant<int, 128>());
    return of_width(std::integral_constant<int, 256>());
  };
  const auto of_bias = [&](auto is_biased, auto is_scored) {
    a.dtype == GMETA_BFLOAT16 ? of_type(__nv_bfloat16(), is_biased, is_scored)
                              : of_type(__half(), is_biased, is_scored);
  };
  if (!IsScored(a)) return of_bias(std::true_type(), std::false_type());
  biased ? of_bias(std::true_type(), std::true_type())
         : of_bias(std::false_type(), std::true_type());
}

// Calls launch(T, width, whether it is biased) for an attention with softmax, if it has tokens and
// heads.
template <class Launch>
void DispatchSoftmax(const GmetaHstuAttention& a, const Launch& launch) {
  // Tensors without tokens have no data.
  Require(a.tokens == 0 || a.heads == 0 || IsScored(a),
          "hstu attention: softmax needs q and k, not the bias alone");
  Require(a.alpha >= 0.0f,
          "hstu attention: softmax takes an alpha of at least 0, got " + std::to_string(a.alpha));
  Dispatch(a, [&](auto type, auto width, auto is_biased, auto is_scored) {
    if constexpr (is_scored()) launch(type, width, is_biased);
  });
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_LAUNCH_CUH_
