// What the kernels of GmetaUnique and GmetaOrderByOwner do on any device: their checks and their
// outputs.

#ifndef GMETA_OPS_UNIQUE_KERNELS_H_
#define GMETA_OPS_UNIQUE_KERNELS_H_

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

// An op of ids: GmetaUnique, or GmetaOrderByOwner if `kOrders`.
template <bool kOrders>
struct IdsOp {
  static constexpr const char* kName = kOrders ? "GmetaOrderByOwner" : "GmetaUnique";

  // Reads the attribute `ranks`.
  static absl::Status ReadRanks(tensorflow::OpKernelConstruction* context, int64_t* ranks) {
    TF_RETURN_IF_ERROR(context->GetAttr("ranks", ranks));
    constexpr int64_t kLeast = kOrders ? 1 : 0;
    if (kLeast <= *ranks && *ranks <= 1024) return absl::OkStatus();
    return Invalid(kName, ": ranks must lie in [", kLeast, ", 1024], got ", *ranks);
  }

  // A call's memory. `room` has place for all ids; the found keys come first in it. It is the
  // output itself if all ids are keys.
  struct Call {
    const int64_t* ids;
    int64_t n;
    tensorflow::Tensor room;
    int64_t* keys;
    int32_t *inverse, *counts;  // the counts are in host memory

    // Checks the ids, and allocates the room and the other outputs.
    absl::Status Begin(tensorflow::OpKernelContext* context, int64_t ranks, int64_t most) {
      using tensorflow::TensorShape;
      const tensorflow::Tensor& input = context->input(0);
      ids = input.flat<int64_t>().data();
      n = input.NumElements();
      if (kOrders && !tensorflow::TensorShapeUtils::IsVector(input.shape())) {
        return Invalid(kName, ": ids must be a vector, got the shape ",
                       input.shape().DebugString());
      }
      if (n > most) {
        return Invalid(kName, ": at most ", most, " ids in a call, got ", n, ": split the batch");
      }
      tensorflow::Tensor *places, *of_owners;
      TF_RETURN_IF_ERROR(context->allocate_output(1, input.shape(), &places, NearGpu()));
      TF_RETURN_IF_ERROR(context->allocate_output(2, TensorShape({ranks}), &of_owners));
      of_owners->flat<int32_t>().setZero();
      if (kOrders) {  // every id is a key
        tensorflow::Tensor* all;
        TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({n}), &all));
        room = *all;
      } else {
        TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, TensorShape({n}), &room));
      }
      keys = room.flat<int64_t>().data();
      inverse = places->flat<int32_t>().data();
      counts = of_owners->flat<int32_t>().data();
      return absl::OkStatus();
    }
  };
};

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_KERNELS_H_
