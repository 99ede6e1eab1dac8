// Vectors as inputs and outputs of kernels: the check of an input, and the outputs of a list.

#ifndef GMETA_OPS_COMMON_KERNELS_VECTORS_H_
#define GMETA_OPS_COMMON_KERNELS_VECTORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

inline absl::Status CheckVector(const char* op, const std::string& what,
                                const tensorflow::Tensor& tensor) {
  if (tensor.dims() == 1) return absl::OkStatus();
  return Invalid(op, ": ", what, " must be a vector, got shape ", tensor.shape().DebugString());
}

// Allocates the vectors of an output that is a list, and returns where each begins.
template <class T, class Size>
absl::Status AllocateVectors(tensorflow::OpKernelContext* context, const char* name,
                             const Size& size, std::vector<T*>* data) {
  tensorflow::OpOutputList list;
  TF_RETURN_IF_ERROR(context->output_list(name, &list));
  for (int i = 0; i < list.size(); ++i) {
    tensorflow::Tensor* tensor;
    TF_RETURN_IF_ERROR(
        list.allocate(i, tensorflow::TensorShape({static_cast<int64_t>(size(i))}), &tensor));
    data->push_back(tensor->flat<T>().data());
  }
  return absl::OkStatus();
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_KERNELS_VECTORS_H_
