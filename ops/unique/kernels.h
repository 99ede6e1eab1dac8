// The op GmetaUnique on any device: what it checks, and where what was found goes. A finder has
//   kMaxIds
//   Find(context, ids, n, keys, inverse, found)
//   Emit(context, room, found)
// where keys, the room, is for n, and those found are its first.

#ifndef GMETA_OPS_UNIQUE_KERNELS_H_
#define GMETA_OPS_UNIQUE_KERNELS_H_

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

template <class Finder>
class UniqueOp : public tensorflow::OpKernel {
 public:
  using tensorflow::OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& ids = context->input(0);
    const int64_t n = ids.NumElements();
    OP_REQUIRES(context, n <= Finder::kMaxIds,
                Invalid("GmetaUnique: at most ", Finder::kMaxIds, " ids in a call, got ", n,
                        ": split the batch"));
    tensorflow::Tensor* inverse;
    OP_REQUIRES_OK(context, context->allocate_output(1, ids.shape(), &inverse, NearGpu()));
    tensorflow::Tensor room;
    OP_REQUIRES_OK(
        context, context->allocate_temp(tensorflow::DT_INT64, tensorflow::TensorShape({n}), &room));
    int64_t found = 0;
    if (n > 0) {
      OP_REQUIRES_OK(
          context, Finder::Find(context, ids.flat<int64_t>().data(), n, room.flat<int64_t>().data(),
                                inverse->flat<int32_t>().data(), &found));
    }
    OP_REQUIRES_OK(context, Finder::Emit(context, room, found));
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_KERNELS_H_
