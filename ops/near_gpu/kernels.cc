// GmetaNearGpu: copies a batch's column to memory from which a GPU copies it without the host.
//
// The driver copies ordinary memory piece by piece through a buffer of its own, and meanwhile no
// other thread can start a kernel. The copy to pinned memory runs in the thread that prepares the
// batch, while the GPU computes.

#include "ops/common/kernels.h"

#include <cstring>

#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

class NearGpuOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& column = context->input(0);
    tensorflow::Tensor* copy;
    OP_REQUIRES_OK(context, context->allocate_output(0, column.shape(), &copy, NearGpu()));
    if (column.TotalBytes() > 0) std::memcpy(copy->data(), column.data(), column.TotalBytes());
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaNearGpu").Device(tensorflow::DEVICE_CPU), NearGpuOp);

}  // namespace
}  // namespace gmeta
