// GmetaNearGpu: copies a batch's column to memory from which a GPU copies it without the host.
//
// The driver copies ordinary memory piece by piece through a buffer of its own, and meanwhile no
// other thread can start a kernel. The copy to pinned memory runs while the batch is prepared and
// the GPU computes. Large columns are copied by several threads: one of them copies some 5 GB/s,
// and a bus carries ten times as much.
//
// GmetaToGpu on a CPU returns its column.

#include "ops/common/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

constexpr size_t kPiece = size_t{1} << 18;  // bytes

class NearGpuOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& column = context->input(0);
    tensorflow::Tensor* copy;
    OP_REQUIRES_OK(context, context->allocate_output(0, column.shape(), &copy, NearGpu()));
    const size_t bytes = column.TotalBytes(), pieces = (bytes + kPiece - 1) / kPiece;
    const char* from = static_cast<const char*>(column.data());
    char* to = static_cast<char*>(copy->data());
    PoolParallelFor{context}(pieces, kPiece, [=](size_t begin, size_t end) {
      const size_t first = begin * kPiece, last = std::min(end * kPiece, bytes);
      std::memcpy(to + first, from + first, last - first);
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaNearGpu").Device(tensorflow::DEVICE_CPU), NearGpuOp);

class ToGpuOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    context->set_output(0, context->input(0));
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaToGpu").Device(tensorflow::DEVICE_CPU), ToGpuOp);

}  // namespace
}  // namespace gmeta
