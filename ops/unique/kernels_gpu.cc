// The GPU kernels of GmetaUnique and GmetaOrderByOwner, which run beside the compute stream. The
// number of keys is a shape, which the host must know, as are the numbers of keys of each rank.

#include <algorithm>
#include <memory>
#include <utility>

#include "ops/common/kernels_beside.h"
#include "ops/unique/gpu/unique_abi.h"
#include "ops/unique/kernels.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <bool kOrders>
class GpuIdsOp : public tensorflow::AsyncOpKernel {
 public:
  explicit GpuIdsOp(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, IdsOp<kOrders>::ReadRanks(context, &ranks_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto work = std::make_shared<Work>();
    OP_REQUIRES_OK_ASYNC(context, work->call.Begin(context, ranks_, int64_t{1} << 30), done);
    if (work->call.n == 0) {
      if (!kOrders) context->set_output(0, work->call.room);
      return done();
    }
    const int64_t ranks = ranks_;
    RunBeside(
        context, [&](SideStream* side) { return work->Begin(context, ranks, side); },
        [=] { return work->End(context, ranks); }, std::move(done));
  }

 private:
  struct Work {
    typename IdsOp<kOrders>::Call call;
    Tensor workspace, of_owners, numbers;  // of_owners: a count for each owner, then the total

    absl::Status Begin(OpKernelContext* context, int64_t owners, SideStream* side) {
      const auto ranks = static_cast<int32_t>(owners);
      const size_t bytes = kOrders ? gmeta_gpu_order_by_owner_workspace(call.n, ranks)
                                   : gmeta_gpu_unique_workspace(call.n, ranks);
      TF_RETURN_IF_ERROR(context->allocate_temp(
          tensorflow::DT_INT8, TensorShape({static_cast<int64_t>(bytes)}), &workspace));
      const TensorShape shape({kOrders ? ranks : ranks + 1});
      TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32, shape, &of_owners));
      TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32, shape, &numbers, Pinned()));
      TF_RETURN_IF_ERROR(CudaStatus(side->Follow()));
      int32_t* const counts = of_owners.flat<int32_t>().data();
      void* const room = workspace.flat<tensorflow::int8>().data();
      void* const stream = side->stream();
      TF_RETURN_IF_ERROR(CudaStatus(
          kOrders      ? gmeta_gpu_order_by_owner(call.ids, call.n, ranks, call.keys, call.inverse,
                                                  counts, room, bytes, stream)
          : ranks == 0 ? gmeta_gpu_unique(call.ids, call.n, call.keys, call.inverse, counts, room,
                                          bytes, stream)
                       : gmeta_gpu_unique_by_owner(call.ids, call.n, ranks, call.keys, call.inverse,
                                                   counts, counts + ranks, room, bytes, stream)));
      return CopyBeside(of_owners, *side, &numbers);
    }

    // Outputs the room itself, cut to size: its memory is freed with the batch.
    absl::Status End(OpKernelContext* context, int64_t ranks) {
      workspace = of_owners = Tensor();  // before others allocate
      const int32_t* const counts = numbers.flat<int32_t>().data();
      std::copy_n(counts, ranks, call.counts);
      if (!kOrders) context->set_output(0, call.room.Slice(0, counts[ranks]));
      return absl::OkStatus();
    }
  };

  int64_t ranks_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_GPU).HostMemory("counts"),
                        GpuIdsOp<false>);
REGISTER_KERNEL_BUILDER(
    Name("GmetaOrderByOwner").Device(tensorflow::DEVICE_GPU).HostMemory("counts"), GpuIdsOp<true>);

}  // namespace
}  // namespace gmeta
