// Shared by the kernels of HSTU's attention on all devices: the shapes of their inputs.

#ifndef GMETA_OPS_ATTENTION_KERNELS_H_
#define GMETA_OPS_ATTENTION_KERNELS_H_

#include <string>

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta::hstu {

// The numbers of the ops' inputs (ops.cc).
enum Input {
  kQ,
  kK,
  kV,
  kOffsets,
  kVisible,
  kPositions,
  kTimeBuckets,
  kRowTimes,
  kColumnTimes,
  kTimeMap,
  kPlan,
  kOfOut,  // this and the following only in the gradient op
  kOut,
  kLogSums,
};

struct AttentionShape {
  int64_t batch;
  int64_t tokens;
  int64_t heads;
  int64_t width;   // of queries and keys; 0: attention by the bias alone
  int64_t values;  // width of values

  bool scored() const { return width > 0; }
};

inline absl::Status ReadShape(tensorflow::OpKernelContext* context, AttentionShape* shape) {
  const auto &q = context->input(kQ).shape(), &k = context->input(kK).shape();
  const auto &v = context->input(kV).shape(), &visible = context->input(kVisible).shape();
  const auto& offsets = context->input(kOffsets).shape();
  if (v.dims() != 3)
    return Invalid("attention: v must be (tokens, heads, width), got ", v.DebugString());
  const bool scored = q.dims() == 3;
  *shape = {offsets.dims() == 1 ? offsets.dim_size(0) - 1 : -1, v.dim_size(0), v.dim_size(1),
            scored ? q.dim_size(2) : 0, v.dim_size(2)};
  if (q != k || (scored && (q.dim_size(0) != v.dim_size(0) || q.dim_size(1) != v.dim_size(1)))) {
    return Invalid("attention: q and k must be of one shape, with v's tokens and heads, got ",
                   q.DebugString(), ", ", k.DebugString(), " and ", v.DebugString());
  }
  if (visible.dims() != 2 || visible.dim_size(0) != shape->tokens || visible.dim_size(1) != 3) {
    return Invalid("attention: visible must be (", shape->tokens,
                   ", 3), as AttentionMask.visible gives it, got ", visible.DebugString());
  }
  if (shape->batch < 0)
    return Invalid("attention: offsets must be (batch + 1,), got ", offsets.DebugString());
  return absl::OkStatus();
}

// Checks a bias's inputs, from `first` on; `buckets` is the number of time buckets.
inline absl::Status CheckBias(tensorflow::OpKernelContext* context, int first, int64_t tokens,
                              int64_t buckets) {
  const int64_t places = context->input(first).NumElements();
  const int64_t found = context->input(first + 1).NumElements();
  if (places > 0 && places % 2 == 0)
    return Invalid("attention: a bias of positions has 2n - 1 numbers, got ", places);
  if (found == 0) return absl::OkStatus();
  for (const int input : {first + 2, first + 3}) {
    if (context->input(input).NumElements() != tokens) {
      return Invalid("attention: a bias of times needs a time of each of the ", tokens,
                     " tokens, got ", context->input(input).NumElements());
    }
  }
  if (found == buckets) return absl::OkStatus();
  return Invalid("attention: a bias of times has ", buckets, " buckets, got ", found);
}

// Checks the gradient of the output.
inline absl::Status CheckOfOut(tensorflow::OpKernelContext* context) {
  const auto& of_out = context->input(kOfOut).shape();
  if (of_out == context->input(kV).shape()) return absl::OkStatus();
  return Invalid("attention: gradients must be of v's shape, got ", of_out.DebugString());
}

// Checks what the gradient of softmax takes of the forward pass; `rows` is the shape of a number
// for each row.
inline absl::Status CheckKept(tensorflow::OpKernelContext* context,
                              const tensorflow::TensorShape& rows) {
  const auto &out = context->input(kOut).shape(), &log_sums = context->input(kLogSums).shape();
  if (out == context->input(kV).shape() && log_sums == rows) return absl::OkStatus();
  return Invalid("attention: with softmax, the gradient takes the output, of v's shape, and ",
                 rows.DebugString(), " logarithms of sums, got ", out.DebugString(), " and ",
                 log_sums.DebugString());
}

// Reads whether weights are a softmax, from the attribute `form`.
inline absl::Status ReadForm(tensorflow::OpKernelConstruction* context, bool* softmax) {
  std::string form;
  TF_RETURN_IF_ERROR(context->GetAttr("form", &form));
  *softmax = form == "softmax";
  return absl::OkStatus();
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_KERNELS_H_
