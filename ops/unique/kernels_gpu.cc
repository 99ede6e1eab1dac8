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
    TF_RETURN_IF_ERROR(ReadBack(context, of_owners, &numbers));
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
    TF_RETURN_IF_ERROR(ReadBack(context, of_owners, &numbers));
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
