// The kernel of GmetaKarmarkarKarp.

#include <cmath>
#include <limits>

#include "io/balance/karmarkar_karp.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta::balance {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class KarmarkarKarpOp : public OpKernel {
 public:
  explicit KarmarkarKarpOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    const Tensor& costs = context->input(0);
    const double* data = costs.flat<double>().data();
    const int64_t n = costs.NumElements();
    const int32_t ranks = context->input(1).scalar<int32_t>()();
    OP_REQUIRES(context, ranks >= 1,
                absl::InvalidArgumentError(
                    absl::StrCat("GmetaKarmarkarKarp: at least one rank is needed, got ", ranks)));
    OP_REQUIRES(context, n <= std::numeric_limits<int32_t>::max(),
                absl::InvalidArgumentError(
                    absl::StrCat("GmetaKarmarkarKarp: at most 2^31 - 1 sequences, got ", n)));
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES(context, std::isfinite(data[i]) && data[i] >= 0,
                  absl::InvalidArgumentError(
                      absl::StrCat("GmetaKarmarkarKarp: the cost of sequence ", i, " is ", data[i],
                                   "; it must be a number from 0 on")));
    }
    Tensor* rank_of;
    OP_REQUIRES_OK(context, context->allocate_output(0, costs.shape(), &rank_of));
    KarmarkarKarp(data, static_cast<size_t>(n), ranks).Deal(rank_of->flat<int32_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaKarmarkarKarp").Device(tensorflow::DEVICE_CPU), KarmarkarKarpOp);

}  // namespace
}  // namespace gmeta::balance
