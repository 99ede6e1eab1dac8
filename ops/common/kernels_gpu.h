// Shared by GPU kernels: the stream that they queue work on, errors of the CUDA library, and
// results that the host waits for.

#ifndef GMETA_OPS_COMMON_KERNELS_GPU_H_
#define GMETA_OPS_COMMON_KERNELS_GPU_H_

#include "ops/common/gpu/cuda_abi.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace gmeta {

// Returns the cudaStream_t of an op's device.
inline void* CudaStream(tensorflow::OpKernelContext* context) {
  return context->op_device_context()->stream()->platform_specific_handle().stream;
}

// Converts a status that a function of the CUDA library has returned.
inline absl::Status CudaStatus(int status) {
  switch (status) {
    case GMETA_CUDA_OK:
      return absl::OkStatus();
    case GMETA_CUDA_INVALID:
      return absl::InvalidArgumentError(gmeta_cuda_error());
    case GMETA_CUDA_UNSUPPORTED:
      return absl::UnimplementedError(gmeta_cuda_error());
    case GMETA_CUDA_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(gmeta_cuda_error());
    case GMETA_CUDA_CANCELLED:
      return absl::CancelledError(gmeta_cuda_error());
    default:
      return absl::InternalError(gmeta_cuda_error());
  }
}

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

// Attributes for memory of the host that the GPU copies to at the bus's speed.
inline tensorflow::AllocatorAttributes Pinned() {
  tensorflow::AllocatorAttributes attributes;
  attributes.set_on_host(true);
  attributes.set_gpu_compatible(true);
  return attributes;
}

// Copies a tensor from the device, and waits for it and for all work that was queued before.
inline absl::Status ReadBack(tensorflow::OpKernelContext* context, const tensorflow::Tensor& from,
                             tensorflow::Tensor* to) {
  TF_RETURN_IF_ERROR(context->allocate_temp(from.dtype(), from.shape(), to, Pinned()));
  stream_executor::Stream* const stream = context->op_device_context()->stream();
  const stream_executor::DeviceMemoryBase data(const_cast<char*>(from.tensor_data().data()),
                                               from.TotalBytes());
  TF_RETURN_IF_ERROR(QueueCopy(stream, data, const_cast<char*>(to->tensor_data().data()), 0));
  return stream->BlockHostUntilDone();
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_KERNELS_GPU_H_
