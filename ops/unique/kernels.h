// The ops GmetaUnique and GmetaOrderByOwner on any device: their checks and their outputs. A finder
// has
//   kMaxIds
//   Find(context, ids, n, ranks, keys, inverse, counts, found)
//   Emit(context, room, found)
//   Order(context, ids, n, ranks, keys, inverse, counts)
// Find's `keys` points into `room`, which has room for n; the found keys come first. `counts` is in
// host memory.

#ifndef GMETA_OPS_UNIQUE_KERNELS_H_
#define GMETA_OPS_UNIQUE_KERNELS_H_

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

template <class Finder>
class UniqueOp : public tensorflow::OpKernel {
 public:
  explicit UniqueOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES(context, ranks_ >= 0 && ranks_ <= 1024,
                Invalid("GmetaUnique: ranks must lie in [0, 1024], got ", ranks_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& ids = context->input(0);
    const int64_t n = ids.NumElements();
    OP_REQUIRES(context, n <= Finder::kMaxIds,
                Invalid("GmetaUnique: at most ", Finder::kMaxIds, " ids in a call, got ", n,
                        ": split the batch"));
    tensorflow::Tensor* inverse;
    OP_REQUIRES_OK(context, context->allocate_output(1, ids.shape(), &inverse, NearGpu()));
    tensorflow::Tensor *counts, room;
    OP_REQUIRES_OK(context,
                   context->allocate_output(2, tensorflow::TensorShape({ranks_}), &counts));
    counts->flat<int32_t>().setZero();
    OP_REQUIRES_OK(
        context, context->allocate_temp(tensorflow::DT_INT64, tensorflow::TensorShape({n}), &room));
    int64_t found = 0;
    if (n > 0) {
      OP_REQUIRES_OK(
          context,
          Finder::Find(context, ids.flat<int64_t>().data(), n, static_cast<int32_t>(ranks_),
                       room.flat<int64_t>().data(), inverse->flat<int32_t>().data(),
                       counts->flat<int32_t>().data(), &found));
    }
    OP_REQUIRES_OK(context, Finder::Emit(context, room, found));
  }

 private:
  int64_t ranks_;
};

template <class Finder>
class OrderByOwnerOp : public tensorflow::OpKernel {
 public:
  explicit OrderByOwnerOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES(context, ranks_ <= 1024,
                Invalid("GmetaOrderByOwner: ranks must lie in [1, 1024], got ", ranks_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& ids = context->input(0);
    OP_REQUIRES(context, tensorflow::TensorShapeUtils::IsVector(ids.shape()),
                Invalid("GmetaOrderByOwner: ids must be a vector, got the shape ",
                        ids.shape().DebugString()));
    const int64_t n = ids.NumElements();
    OP_REQUIRES(context, n <= Finder::kMaxIds,
                Invalid("GmetaOrderByOwner: at most ", Finder::kMaxIds, " ids in a call, got ", n,
                        ": split the batch"));
    tensorflow::Tensor *keys, *inverse, *counts;
    OP_REQUIRES_OK(context, context->allocate_output(0, ids.shape(), &keys));
    OP_REQUIRES_OK(context, context->allocate_output(1, ids.shape(), &inverse));
    OP_REQUIRES_OK(context,
                   context->allocate_output(2, tensorflow::TensorShape({ranks_}), &counts));
    counts->flat<int32_t>().setZero();
    if (n == 0) return;
    OP_REQUIRES_OK(
        context, Finder::Order(context, ids.flat<int64_t>().data(), n, static_cast<int32_t>(ranks_),
                               keys->flat<int64_t>().data(), inverse->flat<int32_t>().data(),
                               counts->flat<int32_t>().data()));
  }

 private:
  int64_t ranks_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_KERNELS_H_
