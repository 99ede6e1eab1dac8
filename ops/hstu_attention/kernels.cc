// The CPU kernels of GmetaHstuAttention and its gradient.

#include "ops/common/kernels.h"

#include <limits>
#include <memory>
#include <vector>

#include "ops/hstu_attention/attention.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The inputs that both ops take, checked.
class AttentionOp : public OpKernel {
 public:
  explicit AttentionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    std::vector<int64_t> starts;
    OP_REQUIRES_OK(context, context->GetAttr("bucket_starts", &starts));
    buckets_ = std::make_unique<hstu::TimeBuckets>(starts.data(), starts.size());
    time_buckets_ = static_cast<int64_t>(starts.size()) + 1;
  }

 protected:
  absl::Status Read(OpKernelContext* context, hstu::Inputs* in) {
    const Tensor &q = context->input(0), &k = context->input(1), &v = context->input(2);
    const Tensor &visible = context->input(4), &positions = context->input(5);
    const Tensor& time_buckets = context->input(6);
    if (v.dims() != 3)
      return Invalid("attention: v must be (tokens, heads, width), got ", v.shape().DebugString());
    const int64_t tokens = v.dim_size(0);
    const bool scored = q.dims() == 3;
    if (q.shape() != k.shape() ||
        (scored && (q.dim_size(0) != tokens || q.dim_size(1) != v.dim_size(1)))) {
      return Invalid("attention: q and k must be of one shape, with v's tokens and heads, got ",
                     q.shape().DebugString(), ", ", k.shape().DebugString(), " and ",
                     v.shape().DebugString());
    }
    if (visible.dims() != 2 || visible.dim_size(0) != tokens || visible.dim_size(1) != 3) {
      return Invalid("attention: visible must be (", tokens,
                     ", 3), as AttentionMask.visible gives it, got ",
                     visible.shape().DebugString());
    }
    TF_RETURN_IF_ERROR(CheckOffsets(context->input(3), tokens));
    in->q = scored ? q.flat<float>().data() : nullptr;
    in->k = scored ? k.flat<float>().data() : nullptr;
    in->v = v.flat<float>().data();
    in->heads = static_cast<int>(v.dim_size(1));
    in->width = scored ? static_cast<int>(q.dim_size(2)) : 0;
    in->values = static_cast<int>(v.dim_size(2));
    in->scale = scale_;
    in->alpha = alpha_;
    in->visible = reinterpret_cast<const hstu::Visible*>(visible.flat<int32_t>().data());
    if (positions.NumElements() > 0) {
      if (positions.NumElements() % 2 == 0) {
        return Invalid("attention: a bias of positions has 2n - 1 numbers, got ",
                       positions.NumElements());
      }
      in->bias.positions = positions.flat<float>().data();
      in->bias.n = (positions.NumElements() + 1) / 2;
    }
    if (time_buckets.NumElements() > 0) {
      for (int input : {7, 8}) {
        if (context->input(input).NumElements() != tokens) {
          return Invalid("attention: a bias of times needs a time of each of the ", tokens,
                         " tokens, got ", context->input(input).NumElements());
        }
      }
      if (time_buckets.NumElements() != time_buckets_) {
        return Invalid("attention: a bias of times has ", time_buckets_, " buckets, got ",
                       time_buckets.NumElements());
      }
      in->bias.time_buckets = time_buckets.flat<float>().data();
      in->bias.buckets = buckets_.get();
      in->bias.row_times = context->input(7).flat<int64_t>().data();
      in->bias.column_times = context->input(8).flat<int64_t>().data();
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status CheckOffsets(const Tensor& offsets, int64_t tokens) {
    if (offsets.dims() != 1 || offsets.NumElements() < 1) {
      return Invalid("attention: offsets must be (batch + 1,), got ",
                     offsets.shape().DebugString());
    }
    const auto at = offsets.flat<int64_t>();
    bool rising = at(0) == 0 && at(at.size() - 1) == tokens;
    for (int64_t i = 1; i < at.size(); ++i) {
      rising = rising && at(i) >= at(i - 1) &&
               at(i) - at(i - 1) <= std::numeric_limits<int32_t>::max() / 2;
    }
    if (rising) return absl::OkStatus();
    return Invalid("attention: offsets must rise from 0 to the number of tokens, ", tokens,
                   ", got ", offsets.SummarizeValue(8));
  }

  float scale_;
  float alpha_;
  int64_t time_buckets_;
  std::unique_ptr<hstu::TimeBuckets> buckets_;
};

class HstuAttentionOp : public AttentionOp {
 public:
  using AttentionOp::AttentionOp;

  void Compute(OpKernelContext* context) override {
    hstu::Inputs in;
    OP_REQUIRES_OK(context, Read(context, &in));
    Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(2).shape(), &out));
    const Tensor& offsets = context->input(3);
    hstu::Forward(in, offsets.flat<int64_t>().data(), offsets.NumElements() - 1,
                  out->flat<float>().data(), PoolParallelFor(context));
  }
};

class HstuAttentionGradientOp : public AttentionOp {
 public:
  using AttentionOp::AttentionOp;

  void Compute(OpKernelContext* context) override {
    hstu::Inputs in;
    OP_REQUIRES_OK(context, Read(context, &in));
    const Tensor& of_out = context->input(9);
    OP_REQUIRES(
        context, of_out.shape() == context->input(2).shape(),
        Invalid("attention: gradients must be of v's shape, got ", of_out.shape().DebugString()));
    Tensor* outputs[5];
    const int of[] = {0, 1, 2, 5, 6};
    for (int i = 0; i < 5; ++i) {
      OP_REQUIRES_OK(context,
                     context->allocate_output(i, context->input(of[i]).shape(), &outputs[i]));
    }
    hstu::BiasGradient of_bias(outputs[3]->NumElements(), outputs[4]->NumElements());
    const Tensor& offsets = context->input(3);
    hstu::Backward(in, offsets.flat<int64_t>().data(), offsets.NumElements() - 1,
                   of_out.flat<float>().data(),
                   {outputs[0]->flat<float>().data(), outputs[1]->flat<float>().data(),
                    outputs[2]->flat<float>().data()},
                   &of_bias, PoolParallelFor(context));
    std::copy(of_bias.positions.begin(), of_bias.positions.end(), outputs[3]->flat<float>().data());
    auto of_buckets = outputs[4]->flat<float>();
    for (int64_t i = 0; i < of_buckets.size(); ++i) of_buckets(i) = of_bias.OfBucket(i);
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaHstuAttention").Device(tensorflow::DEVICE_CPU), HstuAttentionOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHstuAttentionGradient").Device(tensorflow::DEVICE_CPU),
                        HstuAttentionGradientOp);

}  // namespace
}  // namespace gmeta
