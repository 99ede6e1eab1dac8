// The C interface of an HSTU layer's computations on the GPU besides attention: norms, gates and
// activations of rows, in one pass over memory each (row_norm.cuh has the formulas), the product
// that is activated while it is written (silu_projection.cuh), and the additions of a layer
// (residual.cuh).
//
// Functions return a status (cuda_abi.h). Pointers are to device memory; work is queued on
// `stream`.

#ifndef GMETA_OPS_LAYER_LAYER_ABI_H_
#define GMETA_OPS_LAYER_LAYER_ABI_H_

#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

// A matrix of rows, 16-byte aligned. Rows are `stride` numbers apart, a multiple of 8, so the
// matrix may be a part of wider rows. Null data: there is no matrix.
struct GmetaRows {
  void* data;
  int64_t stride;
};

// Computes y = SiLU(x) of (rows, width), width a multiple of 8. dtype is as in attention_abi.h.
GMETA_CUDA_API int gmeta_silu(int32_t dtype, int64_t rows, int32_t width, GmetaRows x, GmetaRows y,
                              void* stream);
// Replaces of_y by the gradient of x.
GMETA_CUDA_API int gmeta_silu_back(int32_t dtype, int64_t rows, int32_t width, GmetaRows x,
                                   GmetaRows of_y, void* stream);

// Computes z = x w and activated = SiLU(z[:, activated_from:]), in one pass (silu_projection.cuh),
// on GPUs of compute capability 9.0. x is (rows, inner), w (inner, columns). All four are row-major
// without gaps and 16-byte aligned; inner and columns are multiples of 8, activated_from of 64.
struct GmetaSiluProjection {
  int32_t dtype;
  int32_t inner;
  int32_t columns;
  int32_t activated_from;  // below columns
  int64_t rows;
  const void* x;
  const void* w;
  void* z;
  void* activated;  // (rows, columns - activated_from)
};

GMETA_CUDA_API int gmeta_silu_projection(const GmetaSiluProjection* projection, void* stream);

// y = LN(x) [* scale + offset] [* SiLU(gate)].
struct GmetaRowNorm {
  int32_t dtype;
  int32_t width;  // a multiple of 8, up to 4,096
  int64_t rows;
  float epsilon;
  GmetaRows x;
  GmetaRows gate;      // or none
  const void* scale;   // (width,) of the dtype, or null
  const void* offset;  // likewise; null if scale is
};

// `statistics` is (rows, 2) float32.
GMETA_CUDA_API int gmeta_row_norm(const GmetaRowNorm* norm, GmetaRows y, float* statistics,
                                  void* stream);

struct GmetaRowNormGradients {
  GmetaRows of_y;
  GmetaRows x_added;     // a gradient of another use of x, added to x's own; or none
  GmetaRows gate_added;  // the same for SiLU(gate)
  GmetaRows of_x;
  GmetaRows of_gate;  // if there is a gate
  void* of_scale;     // (width,) of the dtype, if there are weights
  void* of_offset;
  void* workspace;  // of gmeta_row_norm_workspace bytes, if there are weights
};

GMETA_CUDA_API int64_t gmeta_row_norm_workspace(int32_t width);
GMETA_CUDA_API int gmeta_row_norm_back(const GmetaRowNorm* norm, const float* statistics,
                                       const GmetaRowNormGradients* gradients, void* stream);

// Computes y = x + (change + offset) of (rows, width) without gaps, 16-byte aligned; offset is
// (width,). x and offset may be null. width is a multiple of 8.
GMETA_CUDA_API int gmeta_add_rows(int32_t dtype, int64_t rows, int32_t width, const void* x,
                                  const void* change, const void* offset, void* y, void* stream);
// Computes sums, (width,), of the columns of such an x; `workspace` has gmeta_column_sums_workspace
// bytes.
GMETA_CUDA_API int64_t gmeta_column_sums_workspace(int32_t width);
GMETA_CUDA_API int gmeta_column_sums(int32_t dtype, int64_t rows, int32_t width, const void* x,
                                     void* sums, void* workspace, void* stream);

}  // extern "C"

#endif  // GMETA_OPS_LAYER_LAYER_ABI_H_
