// The C ABI of an HSTU layer's computations besides products and attention: checks and launches.

#include <algorithm>
#include <type_traits>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/layer/layer_abi.h"
#include "ops/layer/row_norm.cuh"
#include "ops/layer/row_types.cuh"
#include "ops/layer/silu.cuh"

namespace gmeta::hstu {
namespace {

template <class T>
T* At(const GmetaRows& rows) {
  return static_cast<T*>(rows.data);
}

// Calls launch(chunks, warps) with values that fit rows of this width.
template <class Launch>
void OfWidth(int32_t width, const Launch& launch) {
  const auto of = [&](auto chunks, auto warps) { launch(chunks, warps); };
  using std::integral_constant;
  if (width <= 256) return of(integral_constant<int, 1>(), integral_constant<int, 1>());
  if (width <= 512) return of(integral_constant<int, 2>(), integral_constant<int, 1>());
  if (width <= 1024) return of(integral_constant<int, 2>(), integral_constant<int, 2>());
  return of(integral_constant<int, 2>(), integral_constant<int, 8>());
}

template <class T>
RowNorm<T> Of(const GmetaRowNorm& n) {
  return {n.rows,
          n.width,
          n.epsilon,
          At<T>(n.x),
          At<T>(n.gate),
          static_cast<const T*>(n.scale),
          static_cast<const T*>(n.offset),
          n.x.stride,
          n.gate.stride};
}

constexpr int kSiluThreads = 256;

unsigned SiluBlocks(int64_t rows, int32_t width) {
  const int64_t blocks = (rows * (width / 8) + kSiluThreads - 1) / kSiluThreads;
  return static_cast<unsigned>(std::min<int64_t>(blocks, 132 * 16));
}

}  // namespace
}  // namespace gmeta::hstu

using namespace gmeta::hstu;
using gmeta::Guarded;

int gmeta_silu(int32_t dtype, int64_t rows, int32_t width, GmetaRows x, GmetaRows y, void* stream) {
  return Guarded([&] {
    CheckWidth(width, INT32_MAX);
    if (rows == 0) return;
    OfType(dtype, [&](auto type) {
      using T = decltype(type);
      SiluRows<T><<<SiluBlocks(rows, width), kSiluThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          At<T>(x), x.stride, rows, width, At<T>(y), y.stride);
    });
    gmeta::CheckLaunch("silu");
  });
}

int gmeta_silu_back(int32_t dtype, int64_t rows, int32_t width, GmetaRows x, GmetaRows of_y,
                    void* stream) {
  return Guarded([&] {
    CheckWidth(width, INT32_MAX);
    if (rows == 0) return;
    OfType(dtype, [&](auto type) {
      using T = decltype(type);
      SiluRowsBack<T>
          <<<SiluBlocks(rows, width), kSiluThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              At<T>(x), x.stride, rows, width, At<T>(of_y), of_y.stride);
    });
    gmeta::CheckLaunch("silu, gradient");
  });
}

int gmeta_row_norm(const GmetaRowNorm* norm, GmetaRows y, float* statistics, void* stream) {
  return Guarded([&] {
    CheckWidth(norm->width, kNormWidest);
    if (norm->rows == 0) return;
    OfType(norm->dtype, [&](auto type) {
      OfWidth(norm->width, [&](auto chunks, auto warps) {
        using T = decltype(type);
        constexpr int kWarps = decltype(warps)::value;
        NormRows<T, decltype(chunks)::value, kWarps>
            <<<kNormBlocks, kNormThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                Of<T>(*norm), At<T>(y), y.stride, reinterpret_cast<float2*>(statistics));
      });
    });
    gmeta::CheckLaunch("row norm");
  });
}

int64_t gmeta_row_norm_workspace(int32_t width) {
  return static_cast<int64_t>(sizeof(float)) * 2 * width * kNormBlocksSumming;
}

int gmeta_row_norm_back(const GmetaRowNorm* norm, const float* statistics,
                        const GmetaRowNormGradients* g, void* stream) {
  return Guarded([&] {
    CheckWidth(norm->width, kNormWidest);
    OfType(norm->dtype, [&](auto type) {
      OfWidth(norm->width, [&](auto chunks, auto warps) {
        using T = decltype(type);
        constexpr int kWarps = decltype(warps)::value;
        const auto queue = static_cast<cudaStream_t>(stream);
        float* const sums = norm->scale == nullptr ? nullptr : static_cast<float*>(g->workspace);
        const RowNormGradients<T> to{At<T>(g->of_y), At<T>(g->x_added), At<T>(g->gate_added),
                                     At<T>(g->of_x), At<T>(g->of_gate), sums,
                                     g->of_y.stride, g->x_added.stride, g->gate_added.stride,
                                     g->of_x.stride, g->of_gate.stride};
        const auto launch_back = [&](auto weights, int blocks) {
          NormRowsBack<T, decltype(chunks)::value, kWarps, decltype(weights)::value>
              <<<blocks, kNormThreads, 0, queue>>>(Of<T>(*norm),
                                                   reinterpret_cast<const float2*>(statistics), to);
        };
        if (sums == nullptr) return launch_back(std::false_type(), kNormBlocks);
        launch_back(std::true_type(), kNormBlocksSumming);
        SumBlocks<T><<<(2 * norm->width + 255) / 256, 256, 0, queue>>>(
            sums, norm->width, static_cast<T*>(g->of_scale), static_cast<T*>(g->of_offset));
      });
    });
    gmeta::CheckLaunch("row norm, gradient");
  });
}
