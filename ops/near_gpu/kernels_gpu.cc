// The GPU kernel of GmetaToGpu, which copies a batch's column beside the compute stream. TensorFlow
// copies tensors to a GPU one after another, so behind a column of a later batch, the numbers that
// the present step is about to use would wait.

#include <utility>

#include "ops/common/kernels_beside.h"

namespace gmeta {
namespace {

class GpuToGpuOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    const tensorflow::Tensor& column = context->input(0);
    tensorflow::Tensor* copy;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, column.shape(), &copy), done);
    if (column.TotalBytes() == 0) return done();
    const auto begin = [&](SideStream* side) {
      TF_RETURN_IF_ERROR(CudaStatus(side->Follow()));
      return CopyBeside(column, *side, copy);
    };
    RunBeside(context, begin, [] { return absl::OkStatus(); }, std::move(done));
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaToGpu").Device(tensorflow::DEVICE_GPU).HostMemory("column"),
                        GpuToGpuOp);

}  // namespace
}  // namespace gmeta
