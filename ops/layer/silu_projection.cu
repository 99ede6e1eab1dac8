// The C ABI of silu_projection.cuh: checks and launches.

#include <string>

#include "ops/attention/gpu/launch.cuh"
#include "ops/common/gpu/cuda_error.cuh"
#include "ops/layer/layer_abi.h"
#include "ops/layer/silu_projection.cuh"

namespace gmeta::hstu {
namespace {

void Check(const GmetaSiluProjection& p) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw CudaError(GMETA_CUDA_UNSUPPORTED, "silu projection: " + message);
  };
  require(p.dtype == GMETA_BFLOAT16 || p.dtype == GMETA_FLOAT16,
          "the GPU's kernels take bfloat16 and float16");
  require(p.inner > 0 && p.inner % 8 == 0 && p.columns > 0 && p.columns % 8 == 0,
          "the sum's places and the columns must be multiples of 8, got " +
              std::to_string(p.inner) + " and " + std::to_string(p.columns));
  require(p.rows >= 0 && p.rows <= INT32_MAX / 2 &&
              p.rows / kProjectionRows <= INT32_MAX / 2 / (p.columns / kProjectionColumns + 1),
          "too many tiles of 128 x 256 for an int: " + std::to_string(p.rows) + " rows, " +
              std::to_string(p.columns) + " columns");
  require(p.activated_from >= 0 && p.activated_from < p.columns &&
              p.activated_from % hopper::kBoxWidth == 0,
          "activated_from must be a multiple of 64 below the number of columns, " +
              std::to_string(p.columns) + ", got " + std::to_string(p.activated_from));
  require(Property(cudaDevAttrComputeCapabilityMajor) == 9,
          "the GPU's kernels need compute capability 9.0 (H100, H200)");
}

template <class T>
void Project(const GmetaSiluProjection& p, cudaStream_t stream) {
  const auto map = [](CUtensorMap* to, const void* data, int64_t rows, int64_t columns,
                      int box_rows) {
    return hopper::MakeTensorMap<T>(to, data, rows, 1, columns, columns, columns, box_rows);
  };
  const int activated = p.columns - p.activated_from;
  ProjectionArguments in;
  Require(map(&in.x, p.x, p.rows, p.inner, kProjectionRows) &&
              map(&in.w, p.w, p.inner, p.columns, kProjectionPlaces) &&
              map(&in.z, p.z, p.rows, p.columns, kProjectionBoxRows) &&
              map(&in.activated, p.activated, p.rows, activated, kProjectionBoxRows),
          "silu projection: a matrix can't be described to the copy engine; all must be 16-byte "
          "aligned");
  in.rows = static_cast<int>(p.rows), in.inner = p.inner, in.columns = p.columns;
  in.activated_from = p.activated_from;
  static_assert(sizeof(ProjectionMemory<T>) <= hopper::kMaxSharedBytes, "fewer stages");
  LaunchPersistent(ProjectionKernel<T>, in, in.Tiles(), kProjectionThreads,
                   sizeof(ProjectionMemory<T>), stream, "silu projection");
}

}  // namespace
}  // namespace gmeta::hstu

int gmeta_silu_projection(const GmetaSiluProjection* projection, void* stream) {
  using namespace gmeta::hstu;
  return gmeta::Guarded([&] {
    const GmetaSiluProjection& p = *projection;
    Check(p);
    if (p.rows == 0) return;
    const auto queue = static_cast<cudaStream_t>(stream);
    p.dtype == GMETA_BFLOAT16 ? Project<__nv_bfloat16>(p, queue) : Project<__half>(p, queue);
  });
}
