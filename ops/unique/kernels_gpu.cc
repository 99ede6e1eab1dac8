// The GPU kernel of GmetaUnique. The number of keys is a shape, which the host has to know: the op
// waits for it.

#include "ops/common/kernels_gpu.h"

#include "ops/gpu_unique/gpu_unique_abi.h"
#include "ops/unique/kernels.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Copies a number from the device, and waits for it and for all that was queued before it.
absl::Status ReadNumber(OpKernelContext* context, const int32_t* from, int32_t* to) {
  tensorflow::AllocatorAttributes pinned;
  pinned.set_on_host(true);
  pinned.set_gpu_compatible(true);
  Tensor room;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32, TensorShape({}), &room, pinned));
  int32_t* const host = room.scalar<int32_t>().data();
  stream_executor::Stream* const stream = context->op_device_context()->stream();
  stream->ThenMemcpy(host,
                     stream_executor::DeviceMemoryBase(const_cast<int32_t*>(from), sizeof(int32_t)),
                     sizeof(int32_t));
  TF_RETURN_IF_ERROR(stream->BlockHostUntilDone());
  *to = *host;
  return absl::OkStatus();
}

struct GpuFinder {
  static constexpr int64_t kMaxIds = int64_t{1} << 30;

  static absl::Status Find(OpKernelContext* context, const int64_t* ids, int64_t n, int64_t* keys,
                           int32_t* inverse, int64_t* found) {
    const size_t bytes = gmeta_gpu_unique_workspace(n, 0);
    Tensor workspace, count;
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_INT8, TensorShape({static_cast<int64_t>(bytes)}), &workspace));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32, TensorShape({}), &count));
    int32_t* const device_count = count.scalar<int32_t>().data();
    TF_RETURN_IF_ERROR(CudaStatus(gmeta_gpu_unique(ids, n, keys, inverse, device_count,
                                                   workspace.flat<tensorflow::int8>().data(), bytes,
                                                   CudaStream(context))));
    int32_t number = 0;
    TF_RETURN_IF_ERROR(ReadNumber(context, device_count, &number));
    *found = number;
    return absl::OkStatus();
  }

  // The room itself, cut: it goes when the batch goes.
  static absl::Status Emit(OpKernelContext* context, const Tensor& room, int64_t found) {
    context->set_output(0, room.Slice(0, found));
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_GPU), UniqueOp<GpuFinder>);

}  // namespace
}  // namespace gmeta
