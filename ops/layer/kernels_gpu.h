// Conversions from tensors to the arguments of layer_abi.h.

#ifndef GMETA_OPS_LAYER_KERNELS_GPU_H_
#define GMETA_OPS_LAYER_KERNELS_GPU_H_

#include <cstdint>
#include <type_traits>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/layer/layer_abi.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta::hstu {

template <class T>
constexpr int32_t kType = std::is_same_v<T, Eigen::half> ? GMETA_FLOAT16 : GMETA_BFLOAT16;

template <class T>
T* Data(const tensorflow::Tensor& tensor) {
  return const_cast<T*>(tensor.flat<T>().data());
}

// Returns the columns of a matrix from column `from` on.
template <class T>
GmetaRows Columns(const tensorflow::Tensor& matrix, int64_t from = 0) {
  return {Data<T>(matrix) + from, matrix.dim_size(1)};
}

}  // namespace gmeta::hstu

// Registers a template of kernels for both dtypes.
#define GMETA_REGISTER_ROWS_KERNEL(name, kernel)                                           \
  REGISTER_KERNEL_BUILDER(                                                                 \
      Name(name).Device(tensorflow::DEVICE_GPU).TypeConstraint<tensorflow::bfloat16>("T"), \
      kernel<tensorflow::bfloat16>);                                                       \
  REGISTER_KERNEL_BUILDER(                                                                 \
      Name(name).Device(tensorflow::DEVICE_GPU).TypeConstraint<Eigen::half>("T"),          \
      kernel<Eigen::half>)

#endif  // GMETA_OPS_LAYER_KERNELS_GPU_H_
