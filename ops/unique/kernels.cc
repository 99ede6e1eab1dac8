// The CPU kernel of GmetaUnique.

#include "ops/common/kernels.h"

#include <limits>

#include "ops/unique/unique.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class UniqueOp : public OpKernel {
 public:
  explicit UniqueOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& ids = context->input(0);
    const int64_t n = ids.NumElements();
    OP_REQUIRES(context, n <= std::numeric_limits<int32_t>::max(),
                absl::InvalidArgumentError(absl::StrCat(
                    "GmetaUnique: at most 2^31 - 1 ids in a call, got ", n, ": split the batch")));
    Tensor* inverse;
    OP_REQUIRES_OK(context, context->allocate_output(1, ids.shape(), &inverse, NearGpu()));
    Tensor room;
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_INT64, TensorShape({n}), &room));
    const int64_t* data = ids.flat<int64_t>().data();
    UniqueFinder finder;
    const size_t found = finder.Find(
        n, [data](size_t i) { return data[i]; }, room.flat<int64_t>().data(),
        inverse->flat<int32_t>().data());
    Tensor* keys;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({static_cast<int64_t>(found)}), &keys));
    std::copy_n(room.flat<int64_t>().data(), found, keys->flat<int64_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_CPU), UniqueOp);

}  // namespace
}  // namespace gmeta
