// The CPU kernels of GmetaHstuAttention and its gradient. They compute in float32; other types are
// converted on the way in and out.

#include "ops/attention/kernels.h"

#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/attention/host/attention.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Reads and checks the inputs that both ops take.
class AttentionOp : public OpKernel {
 public:
  explicit AttentionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(context, hstu::ReadForm(context, &softmax_));
    std::vector<int64_t> starts;
    OP_REQUIRES_OK(context, context->GetAttr("bucket_starts", &starts));
    OP_REQUIRES(context, hstu::AreTimeBuckets(starts.data(), starts.size()),
                Invalid("attention: bucket_starts must be fewer than 256 positive numbers, each at "
                        "least 25% larger than the previous one, got ",
                        starts.size()));
    buckets_ = std::make_unique<hstu::TimeBuckets>(starts.data(), starts.size());
    time_buckets_ = static_cast<int64_t>(starts.size()) + 1;
  }

 protected:
  absl::Status Read(OpKernelContext* context, hstu::Inputs* in) {
    hstu::AttentionShape shape;
    TF_RETURN_IF_ERROR(hstu::ReadShape(context, &shape));
    TF_RETURN_IF_ERROR(CheckOffsets(context->input(hstu::kOffsets), shape.tokens));
    const Tensor& positions = context->input(hstu::kPositions);
    const Tensor& time_buckets = context->input(hstu::kTimeBuckets);
    in->heads = static_cast<int>(shape.heads);
    in->width = static_cast<int>(shape.width);
    in->values = static_cast<int>(shape.values);
    in->tokens = static_cast<size_t>(shape.tokens);
    in->scale = scale_;
    in->alpha = alpha_;
    in->visible = reinterpret_cast<const hstu::Visible*>(
        context->input(hstu::kVisible).flat<int32_t>().data());
    TF_RETURN_IF_ERROR(hstu::CheckBias(context, hstu::kPositions, shape.tokens, time_buckets_));
    if (positions.NumElements() > 0) {
      in->bias.positions = positions.flat<float>().data();
      in->bias.n = (positions.NumElements() + 1) / 2;
    }
    if (time_buckets.NumElements() > 0) {
      in->bias.time_buckets = time_buckets.flat<float>().data();
      in->bias.buckets = buckets_.get();
      in->bias.row_times = context->input(hstu::kRowTimes).flat<int64_t>().data();
      in->bias.column_times = context->input(hstu::kColumnTimes).flat<int64_t>().data();
    }
    return absl::OkStatus();
  }

  bool softmax() const { return softmax_; }

  // The shape of the logarithms of the rows' sums.
  tensorflow::TensorShape LogSumsShape(const hstu::Inputs& in) const {
    if (!softmax_) return tensorflow::TensorShape({0});
    return tensorflow::TensorShape({in.heads, static_cast<int64_t>(in.tokens)});
  }

 private:
  static absl::Status CheckOffsets(const Tensor& offsets, int64_t tokens) {
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
  bool softmax_;
  int64_t time_buckets_;
  std::unique_ptr<hstu::TimeBuckets> buckets_;
};

// Provides the tensors of a kernel in float32, whatever T is.
template <class T>
class Floats {
 public:
  explicit Floats(OpKernelContext* context) : context_(context) {}

  absl::Status Input(int input, const float** data) {
    const Tensor& tensor = context_->input(input);
    if constexpr (std::is_same_v<T, float>) {
      *data = tensor.flat<float>().data();
      return absl::OkStatus();
    } else {
      TF_RETURN_IF_ERROR(Room(tensor.shape()));
      rooms_.back().flat<float>() = tensor.flat<T>().template cast<float>();
      *data = rooms_.back().flat<float>().data();
      return absl::OkStatus();
    }
  }

  absl::Status Output(int output, const tensorflow::TensorShape& shape, float** data) {
    Tensor* tensor;
    TF_RETURN_IF_ERROR(context_->allocate_output(output, shape, &tensor));
    if constexpr (std::is_same_v<T, float>) {
      *data = tensor->flat<float>().data();
    } else {
      TF_RETURN_IF_ERROR(Room(shape));
      *data = rooms_.back().flat<float>().data();
      outputs_.push_back({tensor, rooms_.back()});
    }
    return absl::OkStatus();
  }

  // Converts the outputs. Call it after computing them.
  void Finish() {
    for (auto& [tensor, floats] : outputs_) {
      tensor->template flat<T>() = floats.template flat<float>().template cast<T>();
    }
  }

 private:
  absl::Status Room(const tensorflow::TensorShape& shape) {
    rooms_.emplace_back();
    return context_->allocate_temp(tensorflow::DT_FLOAT, shape, &rooms_.back());
  }

  OpKernelContext* const context_;
  std::vector<Tensor> rooms_;
  std::vector<std::pair<Tensor*, Tensor>> outputs_;
};

template <class T>
absl::Status ReadHeads(OpKernelContext* context, Floats<T>* floats, hstu::Inputs* in) {
  in->q = in->k = nullptr;
  if (in->width > 0) {
    TF_RETURN_IF_ERROR(floats->Input(hstu::kQ, &in->q));
    TF_RETURN_IF_ERROR(floats->Input(hstu::kK, &in->k));
  }
  return floats->Input(hstu::kV, &in->v);
}

template <class T>
class HstuAttentionOp : public AttentionOp {
 public:
  using AttentionOp::AttentionOp;

  void Compute(OpKernelContext* context) override {
    hstu::Inputs in;
    Floats<T> floats(context);
    float* out;
    OP_REQUIRES_OK(context, Read(context, &in));
    OP_REQUIRES_OK(context, ReadHeads(context, &floats, &in));
    OP_REQUIRES_OK(context, floats.Output(0, context->input(hstu::kV).shape(), &out));
    Tensor* log_sums;
    OP_REQUIRES_OK(context, context->allocate_output(1, LogSumsShape(in), &log_sums));
    if (softmax()) in.log_sums = log_sums->flat<float>().data();
    const Tensor& offsets = context->input(hstu::kOffsets);
    hstu::Forward(in, offsets.flat<int64_t>().data(), offsets.NumElements() - 1, out,
                  PoolParallelFor(context));
    floats.Finish();
  }
};

template <class T>
class HstuAttentionGradientOp : public AttentionOp {
 public:
  using AttentionOp::AttentionOp;

  void Compute(OpKernelContext* context) override {
    hstu::Inputs in;
    Floats<T> floats(context);
    const float* of_out;
    OP_REQUIRES_OK(context, Read(context, &in));
    OP_REQUIRES_OK(context, hstu::CheckOfOut(context));
    OP_REQUIRES_OK(context, ReadHeads(context, &floats, &in));
    OP_REQUIRES_OK(context, floats.Input(hstu::kOfOut, &of_out));
    if (softmax()) {
      OP_REQUIRES_OK(context, hstu::CheckKept(context, LogSumsShape(in)));
      OP_REQUIRES_OK(context, floats.Input(hstu::kOut, &in.out));
      const Tensor& log_sums = context->input(hstu::kLogSums);
      in.log_sums = const_cast<float*>(log_sums.flat<float>().data());
    }
    float* of_heads[3];
    for (int i = 0; i < 3; ++i) {
      OP_REQUIRES_OK(context, floats.Output(i, context->input(i).shape(), &of_heads[i]));
    }
    Tensor* of_tables[2];
    const int tables[] = {hstu::kPositions, hstu::kTimeBuckets};
    for (int i = 0; i < 2; ++i) {
      OP_REQUIRES_OK(context, context->allocate_output(3 + i, context->input(tables[i]).shape(),
                                                       &of_tables[i]));
    }
    hstu::BiasGradient of_bias(of_tables[0]->NumElements(), of_tables[1]->NumElements());
    const Tensor& offsets = context->input(hstu::kOffsets);
    hstu::Backward(in, offsets.flat<int64_t>().data(), offsets.NumElements() - 1, of_out,
                   {of_heads[0], of_heads[1], of_heads[2]}, &of_bias, PoolParallelFor(context));
    std::copy(of_bias.positions.begin(), of_bias.positions.end(),
              of_tables[0]->flat<float>().data());
    auto of_buckets = of_tables[1]->flat<float>();
    for (int64_t i = 0; i < of_buckets.size(); ++i) of_buckets(i) = of_bias.OfBucket(i);
    floats.Finish();
  }
};

// A plan or a map of times, which the CPU's kernels don't need.
class NoBytesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* none;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({0}), &none));
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaHstuPlan").Device(tensorflow::DEVICE_CPU), NoBytesOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHstuTimeMap").Device(tensorflow::DEVICE_CPU), NoBytesOp);

#define GMETA_REGISTER(T)                                                                       \
  REGISTER_KERNEL_BUILDER(                                                                      \
      Name("GmetaHstuAttention").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),         \
      HstuAttentionOp<T>);                                                                      \
  REGISTER_KERNEL_BUILDER(                                                                      \
      Name("GmetaHstuAttentionGradient").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), \
      HstuAttentionGradientOp<T>);
GMETA_REGISTER(float)
GMETA_REGISTER(tensorflow::bfloat16)
GMETA_REGISTER(Eigen::half)
#undef GMETA_REGISTER

}  // namespace
}  // namespace gmeta
