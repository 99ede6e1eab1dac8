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
using tensorflow::Tensor;

class HostFinder {
 public:
  static constexpr int64_t kMaxIds = std::numeric_limits<int32_t>::max();

  static absl::Status Find(OpKernelContext* context, const int64_t* ids, int64_t n, int32_t ranks,
                           int64_t* keys, int32_t* inverse, int32_t* counts, int64_t* found) {
    *found = static_cast<int64_t>(
        FindUnique(ids, static_cast<size_t>(n), keys, inverse, PoolParallelFor(context)));
    if (ranks > 0) {
      OrderByOwner(static_cast<size_t>(ranks), keys, static_cast<size_t>(*found), inverse,
                   static_cast<size_t>(n), counts);
    }
    return absl::OkStatus();
  }

  // Outputs a copy of just the keys: if there are few, `room` is mostly empty.
  static absl::Status Emit(OpKernelContext* context, const Tensor& room, int64_t found) {
    Tensor* keys;
    TF_RETURN_IF_ERROR(context->allocate_output(0, tensorflow::TensorShape({found}), &keys));
    std::copy_n(room.flat<int64_t>().data(), found, keys->flat<int64_t>().data());
    return absl::OkStatus();
  }

  static absl::Status Order(OpKernelContext* /*context*/, const int64_t* ids, int64_t n,
                            int32_t ranks, int64_t* keys, int32_t* inverse, int32_t* counts) {
    std::copy_n(ids, n, keys);
    std::iota(inverse, inverse + n, 0);
    OrderByOwner(static_cast<size_t>(ranks), keys, static_cast<size_t>(n), inverse,
                 static_cast<size_t>(n), counts);
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_CPU), UniqueOp<HostFinder>);
REGISTER_KERNEL_BUILDER(Name("GmetaOrderByOwner").Device(tensorflow::DEVICE_CPU),
                        OrderByOwnerOp<HostFinder>);

}  // namespace
}  // namespace gmeta
