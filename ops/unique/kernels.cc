// The CPU kernel of GmetaUnique: on one thread, or on many where the batch is worth it.

#include "ops/common/kernels.h"

#include <limits>

#include "ops/unique/parallel_unique.h"
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
    int64_t* distinct = room.flat<int64_t>().data();
    int32_t* places = inverse->flat<int32_t>().data();
    const PoolParallelFor parallel_for(context);
    size_t found;
    if (n >= kManyIds && parallel_for.threads() >= kManyThreads) {
      found = ParallelUnique(data, n, distinct, places, parallel_for);
    } else {
      UniqueFinder finder;
      found = finder.Find(n, [data](size_t i) { return data[i]; }, distinct, places);
    }
    Tensor* keys;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({static_cast<int64_t>(found)}), &keys));
    std::copy_n(distinct, found, keys->flat<int64_t>().data());
  }

 private:
  // From where on the work that many threads share out is less than that which they add.
  static constexpr int64_t kManyIds = 65536;
  static constexpr int kManyThreads = 4;
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_CPU), UniqueOp);

}  // namespace
}  // namespace gmeta
