// The GPU kernels of GmetaHstuPlan, GmetaHstuTimeMap, GmetaHstuAttention and its gradient. They
// pass tensors to the CUDA library (attention_abi.h).

#include "ops/attention/kernels_gpu.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class HstuPlanOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &offsets = context->input(0), &visible = context->input(1);
    OP_REQUIRES(context, offsets.dims() == 1 && offsets.NumElements() > 0 && visible.dims() == 2,
                Invalid("attention: offsets must be (batch + 1,) and visible (tokens, 3), got ",
                        offsets.shape().DebugString(), " and ", visible.shape().DebugString()));
    const int32_t batch = static_cast<int32_t>(offsets.NumElements() - 1);
    const int64_t tokens = visible.dim_size(0);
    Tensor* plan;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, TensorShape({gmeta_hstu_plan_bytes(tokens, batch)}), &plan));
    OP_REQUIRES_OK(context, CudaStatus(gmeta_hstu_plan(
                                offsets.flat<int64_t>().data(), visible.flat<int32_t>().data(),
                                tokens, batch, plan->flat<uint8_t>().data(), CudaStream(context))));
  }
};

class HstuTimeMapOp : public OpKernel {
 public:
  explicit HstuTimeMapOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket_starts", &starts_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &offsets = context->input(0), &plan = context->input(1);
    const Tensor &rows = context->input(2), &columns = context->input(3);
    OP_REQUIRES(context,
                offsets.dims() == 1 && offsets.NumElements() > 0 &&
                    rows.NumElements() == columns.NumElements(),
                Invalid("attention: a map of times needs offsets (batch + 1,) and as many times of "
                        "rows as of columns, got ",
                        offsets.shape().DebugString(), ", ", rows.NumElements(), " and ",
                        columns.NumElements()));
    const int64_t tokens = rows.NumElements();
    const auto batch = static_cast<int32_t>(offsets.NumElements() - 1);
    OP_REQUIRES_OK(context, hstu::CheckPlan(plan, tokens, batch));
    const void* const of_plan = plan.flat<uint8_t>().data();
    int64_t bytes = 0;
    OP_REQUIRES_OK(context, CudaStatus(gmeta_hstu_time_map_bytes(of_plan, tokens, batch, &bytes,
                                                                 CudaStream(context))));
    // A plan of impossible offsets has no tiles. Attention then outputs NaN.
    Tensor* map;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, TensorShape({std::max<int64_t>(bytes, tokens > 0)}), &map));
    if (bytes == 0) return;
    OP_REQUIRES_OK(
        context, CudaStatus(gmeta_hstu_time_map(of_plan, tokens, batch, rows.flat<int64_t>().data(),
                                                columns.flat<int64_t>().data(), starts_.data(),
                                                static_cast<int32_t>(starts_.size()),
                                                map->flat<uint8_t>().data(), CudaStream(context))));
  }

 private:
  std::vector<int64_t> starts_;
};

template <class T>
class AttentionOp : public OpKernel {
 public:
  explicit AttentionOp(OpKernelConstruction* context) : OpKernel(context), bias_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(context, hstu::ReadForm(context, &softmax_));
    OP_REQUIRES(context, !softmax_ || alpha_ >= 0,
                Invalid("attention: softmax takes an alpha of at least 0, got ", alpha_));
  }

 protected:
  // An attention, and the structs that it points to.
  struct Request {
    GmetaHstuAttention attention;
    hstu::GpuBiasInput bias;
    GmetaSoftmax softmax;
  };

  // Of a (tokens, heads, width) tensor; no data, if it has another rank.
  static GmetaHeads Heads(const Tensor& tensor) {
    if (tensor.dims() != 3) return {};
    return {const_cast<void*>(static_cast<const void*>(tensor.tensor_data().data())),
            tensor.dim_size(1) * tensor.dim_size(2)};
  }

  absl::Status Read(OpKernelContext* context, Request* request) {
    hstu::AttentionShape shape;
    TF_RETURN_IF_ERROR(hstu::ReadShape(context, &shape));
    if (shape.scored() && shape.width != shape.values) {
      return Invalid("attention: on a GPU q, k and v are of one width, got ", shape.width, " and ",
                     shape.values);
    }
    TF_RETURN_IF_ERROR(bias_.Read(context, hstu::kPositions, shape.tokens, &request->bias));
    const int32_t batch = static_cast<int32_t>(shape.batch);
    const Tensor& plan = context->input(hstu::kPlan);
    TF_RETURN_IF_ERROR(hstu::CheckPlan(plan, shape.tokens, batch));
    request->attention = {std::is_same_v<T, Eigen::half> ? GMETA_FLOAT16 : GMETA_BFLOAT16,
                          batch,
                          shape.tokens,
                          static_cast<int32_t>(shape.heads),
                          static_cast<int32_t>(shape.values),
                          alpha_,
                          scale_,
                          context->input(hstu::kVisible).flat<int32_t>().data(),
                          plan.flat<uint8_t>().data(),
                          Heads(context->input(hstu::kQ)),
                          Heads(context->input(hstu::kK)),
                          Heads(context->input(hstu::kV)),
                          request->bias.get(),
                          nullptr};
    return absl::OkStatus();
  }

  bool softmax() const { return softmax_; }

  // (heads, tokens): of a number for each row.
  static TensorShape RowShape(const GmetaHstuAttention& attention) {
    return TensorShape({attention.heads, attention.tokens});
  }

 private:
  float scale_;
  float alpha_;
  bool softmax_;
  const hstu::GpuBiasReader bias_;
};

template <class T>
class HstuAttentionOp : public AttentionOp<T> {
 public:
  using AttentionOp<T>::AttentionOp;

  void Compute(OpKernelContext* context) override {
    typename AttentionOp<T>::Request request;
    OP_REQUIRES_OK(context, this->Read(context, &request));
    Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(hstu::kV).shape(), &out));
    Tensor* log_sums;
    OP_REQUIRES_OK(
        context,
        context->allocate_output(
            1, this->softmax() ? this->RowShape(request.attention) : TensorShape({0}), &log_sums));
    if (out->NumElements() == 0) return;
    if (this->softmax()) {
      request.softmax = {log_sums->flat<float>().data(), {}, nullptr};
      request.attention.softmax = &request.softmax;
    }
    OP_REQUIRES_OK(context, CudaStatus(gmeta_hstu_forward(&request.attention, this->Heads(*out),
                                                          CudaStream(context))));
  }
};

template <class T>
class HstuAttentionGradientOp : public AttentionOp<T> {
 public:
  using AttentionOp<T>::AttentionOp;

  void Compute(OpKernelContext* context) override {
    typename AttentionOp<T>::Request request;
    OP_REQUIRES_OK(context, this->Read(context, &request));
    OP_REQUIRES_OK(context, hstu::CheckOfOut(context));
    Tensor* outputs[3];
    for (int i = 0; i < 3; ++i) {
      OP_REQUIRES_OK(context, context->allocate_output(i, context->input(i).shape(), &outputs[i]));
    }
    hstu::GpuBiasOutput of_bias;
    OP_REQUIRES_OK(context, of_bias.Make(context, request.attention, hstu::kPositions, 3));
    Tensor products;
    if (this->softmax()) OP_REQUIRES_OK(context, this->ReadSoftmax(context, &request, &products));
    OP_REQUIRES_OK(context, CudaStatus(gmeta_hstu_backward(
                                &request.attention, this->Heads(context->input(hstu::kOfOut)),
                                this->Heads(*outputs[0]), this->Heads(*outputs[1]),
                                this->Heads(*outputs[2]), &of_bias.gradient, CudaStream(context))));
  }

 private:
  // Reads what the forward pass has kept, and allocates the workspace.
  absl::Status ReadSoftmax(OpKernelContext* context, typename AttentionOp<T>::Request* request,
                           Tensor* products) {
    const Tensor &out = context->input(hstu::kOut), &log_sums = context->input(hstu::kLogSums);
    const TensorShape rows = this->RowShape(request->attention);
    TF_RETURN_IF_ERROR(hstu::CheckKept(context, rows));
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, rows, products));
    request->softmax = {const_cast<float*>(log_sums.flat<float>().data()), this->Heads(out),
                        products->flat<float>().data()};
    request->attention.softmax = &request->softmax;
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaHstuPlan").Device(tensorflow::DEVICE_GPU), HstuPlanOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHstuTimeMap").Device(tensorflow::DEVICE_GPU), HstuTimeMapOp);

#define GMETA_REGISTER(T)                                                                       \
  REGISTER_KERNEL_BUILDER(                                                                      \
      Name("GmetaHstuAttention").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T"),         \
      HstuAttentionOp<T>);                                                                      \
  REGISTER_KERNEL_BUILDER(                                                                      \
      Name("GmetaHstuAttentionGradient").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T"), \
      HstuAttentionGradientOp<T>);
GMETA_REGISTER(tensorflow::bfloat16)
GMETA_REGISTER(Eigen::half)
#undef GMETA_REGISTER

}  // namespace
}  // namespace gmeta
