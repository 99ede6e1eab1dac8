// The GPU kernels of GmetaResidual and GmetaColumnSums (residual.cuh).

#include <cstdint>

#include "ops/common/kernels.h"
#include "ops/common/kernels_gpu.h"
#include "ops/layer/kernels_gpu.h"
#include "ops/layer/layer_abi.h"

namespace gmeta {
namespace {

using hstu::Data;
using hstu::kType;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <class T>
class ResidualOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &x = context->input(0), &change = context->input(1), &offset = context->input(2);
    const bool has_x = x.shape() != TensorShape({0}), has_offset = offset.NumElements() > 0;
    OP_REQUIRES(
        context,
        change.dims() == 2 && change.dim_size(1) <= INT32_MAX &&
            (!has_x || x.shape() == change.shape()) &&
            (!has_offset || offset.shape() == TensorShape({change.dim_size(1)})),
        Invalid("residual: x and change must be matrices of one shape, and offset a row of them, ",
                "got ", x.shape().DebugString(), ", ", change.shape().DebugString(), " and ",
                offset.shape().DebugString()));
    Tensor* y;
    // Write in place of `change` if no other op reads it.
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({1}, 0, change.shape(), &y));
    OP_REQUIRES_OK(context,
                   CudaStatus(gmeta_add_rows(
                       kType<T>, change.dim_size(0), static_cast<int32_t>(change.dim_size(1)),
                       has_x ? Data<T>(x) : nullptr, Data<T>(change),
                       has_offset ? Data<T>(offset) : nullptr, Data<T>(*y), CudaStream(context))));
  }
};

template <class T>
class ColumnSumsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    OP_REQUIRES(context, x.dims() == 2 && x.dim_size(1) <= INT32_MAX,
                Invalid("sums of columns: x must be a matrix, got ", x.shape().DebugString()));
    const int32_t width = static_cast<int32_t>(x.dim_size(1));
    const TensorShape bytes({gmeta_column_sums_workspace(width)});
    Tensor* sums;
    Tensor room;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({width}), &sums));
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_UINT8, bytes, &room));
    OP_REQUIRES_OK(context, CudaStatus(gmeta_column_sums(kType<T>, x.dim_size(0), width, Data<T>(x),
                                                         Data<T>(*sums), Data<uint8_t>(room),
                                                         CudaStream(context))));
  }
};

GMETA_REGISTER_ROWS_KERNEL("GmetaResidual", ResidualOp);
GMETA_REGISTER_ROWS_KERNEL("GmetaColumnSums", ColumnSumsOp);

}  // namespace
}  // namespace gmeta
