// Shared by GPU kernels: the stream that they queue work on, and errors of the CUDA library.

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

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_KERNELS_GPU_H_
