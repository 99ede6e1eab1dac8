// The CPU kernels of GmetaUnique, on one thread, or on many if the batch is large enough, and of
// GmetaOrderByOwner.

#include "ops/unique/kernels.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "ops/unique/host/by_owner.h"
#include "ops/unique/host/parallel_unique.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;

template <bool kOrders>
class HostIdsOp : public tensorflow::OpKernel {
 public:
  explicit HostIdsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, IdsOp<kOrders>::ReadRanks(context, &ranks_));
  }

  void Compute(OpKernelContext* context) override {
    typename IdsOp<kOrders>::Call call;
    OP_REQUIRES_OK(context, call.Begin(context, ranks_, std::numeric_limits<int32_t>::max()));
    const auto n = static_cast<size_t>(call.n);
    if constexpr (kOrders) {
      std::copy_n(call.ids, n, call.keys);
      std::iota(call.inverse, call.inverse + n, 0);
      Order(call, n);
    } else {
      const size_t found =
          n == 0 ? 0 : FindUnique(call.ids, n, call.keys, call.inverse, PoolParallelFor(context));
      if (ranks_ > 0) Order(call, found);
      // A copy of just the keys: if there are few, the room is mostly empty.
      tensorflow::Tensor* keys;
      const tensorflow::TensorShape shape({static_cast<int64_t>(found)});
      OP_REQUIRES_OK(context, context->allocate_output(0, shape, &keys));
      std::copy_n(call.keys, found, keys->flat<int64_t>().data());
    }
  }

 private:
  template <class Call>
  void Order(const Call& call, size_t keys) const {
    OrderByOwner(static_cast<size_t>(ranks_), call.keys, keys, call.inverse,
                 static_cast<size_t>(call.n), call.counts);
  }

  int64_t ranks_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_CPU), HostIdsOp<false>);
REGISTER_KERNEL_BUILDER(Name("GmetaOrderByOwner").Device(tensorflow::DEVICE_CPU), HostIdsOp<true>);

}  // namespace
}  // namespace gmeta
