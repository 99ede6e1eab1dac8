// The C ABI of residual.cuh: checks and launches.

#include <algorithm>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/layer/layer_abi.h"
#include "ops/layer/residual.cuh"
#include "ops/layer/row_types.cuh"

namespace gmeta::hstu {
namespace {

constexpr int64_t kMostBlocks = 132 * 16;  // about as many as are resident at a time

unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>((threads + kResidualThreads - 1) / kResidualThreads);
}

}  // namespace
}  // namespace gmeta::hstu

using namespace gmeta::hstu;

int gmeta_add_rows(int32_t dtype, int64_t rows, int32_t width, const void* x, const void* change,
                   const void* offset, void* y, void* stream) {
  return gmeta::Guarded([&] {
    CheckWidth(width, INT32_MAX);
    if (rows == 0) return;
    OfType(dtype, [&](auto type) {
      using T = decltype(type);
      const int64_t most = kMostBlocks * kResidualThreads;
      gmeta::Launch(AddRows<T>, BlocksFor(std::min(rows * (width / 8), most)), kResidualThreads, 0,
                    static_cast<cudaStream_t>(stream), "rows added", static_cast<const T*>(x),
                    static_cast<const T*>(change), static_cast<const T*>(offset), rows, width,
                    static_cast<T*>(y));
    });
  });
}

int64_t gmeta_column_sums_workspace(int32_t width) {
  return static_cast<int64_t>(sizeof(float)) * width * kSumBlocks;
}

int gmeta_column_sums(int32_t dtype, int64_t rows, int32_t width, const void* x, void* sums,
                      void* workspace, void* stream) {
  return gmeta::Guarded([&] {
    CheckWidth(width, INT32_MAX);
    OfType(dtype, [&](auto type) {
      using T = decltype(type);
      const auto queue = static_cast<cudaStream_t>(stream);
      float* const parts = static_cast<float*>(workspace);
      gmeta::Launch(SumRows<T>, BlocksFor(width) * kSumBlocks, kResidualThreads, 0, queue,
                    "sums of columns", static_cast<const T*>(x), rows, width, parts);
      gmeta::Launch(SumParts<T>, BlocksFor(width), kResidualThreads, 0, queue, "sums of columns",
                    parts, width, static_cast<T*>(sums));
    });
  });
}
