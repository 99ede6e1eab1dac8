// The GPU kernels of GmetaUnique and GmetaOrderByOwner. The number of keys is a shape, which the
// host must know, as are the numbers of keys of each rank, so the ops wait for them.

#include "ops/common/kernels_gpu.h"

#include <algorithm>

#include "ops/unique/gpu/unique_abi.h"
#include "ops/unique/kernels.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Queues a copy from the device. The stream of TensorFlow 2.16 has ThenMemcpy, whose errors
// BlockHostUntilDone returns; those of later ones have Memcpy. The last argument, an int, prefers
// the first of these two where both fit.
template <class Stream>
auto QueueCopy(Stream* stream, const stream_executor::DeviceMemoryBase& from, void* to, int)
    -> decltype(stream->ThenMemcpy(to, from, from.size()), absl::Status()) {
  stream->ThenMemcpy(to, from, from.size());
  return absl::OkStatus();
}

template <class Stream>
absl::Status QueueCopy(Stream* stream, const stream_executor::DeviceMemoryBase& from, void* to,
                       ...) {
  return stream->Memcpy(to, from, from.size());
}

// Copies numbers from the device, and waits for them and for all work that was queued before.
absl::Status ReadNumbers(OpKernelContext* context, const Tensor& from, Tensor* to) {
  tensorflow::AllocatorAttributes pinned;
  pinned.set_on_host(true);
  pinned.set_gpu_compatible(true);
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT32, from.shape(), to, pinned));
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(from.NumElements());
  int32_t* const data = const_cast<int32_t*>(from.flat<int32_t>().data());
  stream_executor::Stream* const stream = context->op_device_context()->stream();
  TF_RETURN_IF_ERROR(QueueCopy(stream, stream_executor::DeviceMemoryBase(data, bytes),
                               to->flat<int32_t>().data(), 0));
  return stream->BlockHostUntilDone();
}

struct GpuFinder {
  static constexpr int64_t kMaxIds = int64_t{1} << 30;

  static absl::Status Find(OpKernelContext* context, const int64_t* ids, int64_t n, int32_t ranks,
                           int64_t* keys, int32_t* inverse, int32_t* counts, int64_t* found) {
    const size_t bytes = gmeta_gpu_unique_workspace(n, ranks);
    Tensor workspace, of_owners, numbers;  // of_owners: a count for each owner, then the total
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_INT8, TensorShape({static_cast<int64_t>(bytes)}), &workspace));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT32, TensorShape({ranks + 1}), &of_owners));
    int32_t* const on_device = of_owners.flat<int32_t>().data();
    void* const room = workspace.flat<tensorflow::int8>().data();
    void* const stream = CudaStream(context);
    TF_RETURN_IF_ERROR(CudaStatus(
        ranks == 0 ? gmeta_gpu_unique(ids, n, keys, inverse, on_device, room, bytes, stream)
                   : gmeta_gpu_unique_by_owner(ids, n, ranks, keys, inverse, on_device,
                                               on_device + ranks, room, bytes, stream)));
    TF_RETURN_IF_ERROR(ReadNumbers(context, of_owners, &numbers));
    std::copy_n(numbers.flat<int32_t>().data(), ranks, counts);
    *found = numbers.flat<int32_t>()(ranks);
    return absl::OkStatus();
  }

  // Outputs the room itself, cut to size: its memory is freed with the batch.
  static absl::Status Emit(OpKernelContext* context, const Tensor& room, int64_t found) {
    context->set_output(0, room.Slice(0, found));
    return absl::OkStatus();
  }

  static absl::Status Order(OpKernelContext* context, const int64_t* ids, int64_t n, int32_t ranks,
                            int64_t* keys, int32_t* inverse, int32_t* counts) {
    const size_t bytes = gmeta_gpu_order_by_owner_workspace(n, ranks);
    Tensor workspace, of_owners, numbers;
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_INT8, TensorShape({static_cast<int64_t>(bytes)}), &workspace));
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT32, TensorShape({ranks}), &of_owners));
    TF_RETURN_IF_ERROR(CudaStatus(gmeta_gpu_order_by_owner(
        ids, n, ranks, keys, inverse, of_owners.flat<int32_t>().data(),
        workspace.flat<tensorflow::int8>().data(), bytes, CudaStream(context))));
    TF_RETURN_IF_ERROR(ReadNumbers(context, of_owners, &numbers));
    std::copy_n(numbers.flat<int32_t>().data(), ranks, counts);
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaUnique").Device(tensorflow::DEVICE_GPU).HostMemory("counts"),
                        UniqueOp<GpuFinder>);
REGISTER_KERNEL_BUILDER(
    Name("GmetaOrderByOwner").Device(tensorflow::DEVICE_GPU).HostMemory("counts"),
    OrderByOwnerOp<GpuFinder>);

}  // namespace
}  // namespace gmeta
