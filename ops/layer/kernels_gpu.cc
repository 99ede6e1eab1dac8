// The GPU kernels of GmetaRowNorm, GmetaSiluProjection, GmetaHstuMix and their gradients. Each
// calls functions of the CUDA library (layer_abi.h, attention_abi.h) one after another.

#include "ops/common/kernels_gpu.h"

#include <cstdint>

#include "ops/attention/kernels_gpu.h"
#include "ops/common/kernels.h"
#include "ops/layer/kernels_gpu.h"
#include "ops/layer/layer_abi.h"

namespace gmeta {
namespace {

using hstu::Columns;
using hstu::Data;
using hstu::kType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Reads the norm's weights, inputs `scale` and `scale` + 1, and its settings.
template <class T>
absl::Status ReadNorm(OpKernelContext* context, int scale, int64_t rows, int64_t width,
                      float epsilon, GmetaRowNorm* norm) {
  const Tensor &weights = context->input(scale), &offset = context->input(scale + 1);
  const bool weighted = weights.NumElements() > 0;
  for (const Tensor* each : {&weights, &offset}) {
    if (each->NumElements() != (weighted ? width : 0)) {
      return Invalid("norm: scale and offset must both have ", width, " numbers or none, got ",
                     weights.shape().DebugString(), " and ", offset.shape().DebugString());
    }
  }
  *norm = {kType<T>,
           static_cast<int32_t>(width),
           rows,
           epsilon,
           {},
           {},
           weighted ? Data<T>(weights) : nullptr,
           weighted ? Data<T>(offset) : nullptr};
  return absl::OkStatus();
}

// Allocates the memory in which the gradients of the norm's weights are summed.
absl::Status Workspace(OpKernelContext* context, const GmetaRowNorm& norm, Tensor* room) {
  const int64_t bytes = norm.scale == nullptr ? 0 : gmeta_row_norm_workspace(norm.width);
  return context->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), room);
}

class RowNormBase : public OpKernel {
 public:
  explicit RowNormBase(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
  }

 protected:
  template <class T>
  absl::Status Read(OpKernelContext* context, GmetaRowNorm* norm) const {
    const Tensor& x = context->input(0);
    if (x.dims() != 2) return Invalid("norm: x must be a matrix, got ", x.shape().DebugString());
    TF_RETURN_IF_ERROR(ReadNorm<T>(context, 1, x.dim_size(0), x.dim_size(1), epsilon_, norm));
    norm->x = Columns<T>(x);
    return absl::OkStatus();
  }

 private:
  float epsilon_;
};

template <class T>
class RowNormOp : public RowNormBase {
 public:
  explicit RowNormOp(OpKernelConstruction* context) : RowNormBase(context) {
    OP_REQUIRES_OK(context, context->GetAttr("passes", &passes_));
  }

  void Compute(OpKernelContext* context) override {
    GmetaRowNorm norm;
    OP_REQUIRES_OK(context, Read<T>(context, &norm));
    Tensor *y, *statistics;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(0).shape(), &y));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({norm.rows, 2}), &statistics));
    OP_REQUIRES_OK(context,
                   CudaStatus(gmeta_row_norm(&norm, Columns<T>(*y), Data<float>(*statistics),
                                             CudaStream(context))));
    if (passes_) return context->set_output(2, context->input(0));
    Tensor* nothing;
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({0}), &nothing));
  }

 private:
  bool passes_;
};

template <class T>
class RowNormGradientOp : public RowNormBase {
 public:
  using RowNormBase::RowNormBase;

  void Compute(OpKernelContext* context) override {
    GmetaRowNorm norm;
    OP_REQUIRES_OK(context, Read<T>(context, &norm));
    Tensor* outputs[3];
    for (int i = 0; i < 3; ++i) {
      OP_REQUIRES_OK(context, context->allocate_output(i, context->input(i).shape(), &outputs[i]));
    }
    Tensor room;
    OP_REQUIRES_OK(context, Workspace(context, norm, &room));
    const Tensor& of_passed = context->input(5);
    OP_REQUIRES(context,
                of_passed.NumElements() == 0 || of_passed.shape() == context->input(0).shape(),
                Invalid("norm: the gradient of what was passed must be of x's shape, got ",
                        of_passed.shape().DebugString()));
    GmetaRowNormGradients to{};
    to.of_y = Columns<T>(context->input(4));
    if (of_passed.NumElements() > 0) to.x_added = Columns<T>(of_passed);
    to.of_x = Columns<T>(*outputs[0]);
    to.of_scale = Data<T>(*outputs[1]), to.of_offset = Data<T>(*outputs[2]);
    to.workspace = Data<uint8_t>(room);
    OP_REQUIRES_OK(context, CudaStatus(gmeta_row_norm_back(&norm, Data<float>(context->input(3)),
                                                           &to, CudaStream(context))));
  }
};

template <class T>
class SiluProjectionOp : public OpKernel {
 public:
  explicit SiluProjectionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("activated_from", &activated_from_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &x = context->input(0), &w = context->input(1);
    OP_REQUIRES(context,
                x.dims() == 2 && w.dims() == 2 && x.dim_size(1) == w.dim_size(0) &&
                    w.dim_size(1) <= INT32_MAX && w.dim_size(0) <= INT32_MAX &&
                    activated_from_ < w.dim_size(1),
                Invalid("silu projection: x and w must be (rows, inner) and (inner, columns), of ",
                        "more columns than ", activated_from_, ", got ", x.shape().DebugString(),
                        " and ", w.shape().DebugString()));
    const int64_t rows = x.dim_size(0), columns = w.dim_size(1);
    Tensor *z, *activated;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({rows, columns}), &z));
    OP_REQUIRES_OK(context, context->allocate_output(
                                1, TensorShape({rows, columns - activated_from_}), &activated));
    const GmetaSiluProjection projection{kType<T>,
                                         static_cast<int32_t>(w.dim_size(0)),
                                         static_cast<int32_t>(columns),
                                         static_cast<int32_t>(activated_from_),
                                         rows,
                                         Data<T>(x),
                                         Data<T>(w),
                                         Data<T>(*z),
                                         Data<T>(*activated)};
    OP_REQUIRES_OK(context, CudaStatus(gmeta_silu_projection(&projection, CudaStream(context))));
  }

 private:
  int64_t activated_from_;
};

enum MixInput {
  kProjected,
  kOffsets,
  kVisible,
  kPlan,
  kNormScale,
  kNormOffset,
  kBias,  // five inputs
  kActive = kBias + 5,
  kMixed,
  kAttended,
  kStatistics,
  kActivated,
  kOfMixed
};

// The inputs of both ops of a mix. `projected` is [u, v, q, k], each with `width` numbers for all
// heads.
template <class T>
class MixBase : public OpKernel {
 public:
  explicit MixBase(OpKernelConstruction* context) : OpKernel(context), bias_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("heads", &heads_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES_OK(context, context->GetAttr("production", &production_));
  }

 protected:
  struct Mix {
    int64_t tokens, width;
    GmetaHstuAttention attention;
    hstu::GpuBiasInput bias;
    GmetaRowNorm norm;
  };

  absl::Status Read(OpKernelContext* context, Mix* mix) const {
    const Tensor &projected = context->input(kProjected), &visible = context->input(kVisible);
    const Tensor &offsets = context->input(kOffsets), &plan = context->input(kPlan);
    if (projected.dims() != 2 || projected.dim_size(1) % (4 * heads_) != 0) {
      return Invalid("hstu mix: projected must be (tokens, 4 * ", heads_, " * width), got ",
                     projected.shape().DebugString());
    }
    mix->tokens = projected.dim_size(0), mix->width = projected.dim_size(1) / 4;
    if (visible.dims() != 2 || visible.dim_size(0) != mix->tokens || visible.dim_size(1) != 3 ||
        offsets.dims() != 1 || offsets.NumElements() < 1) {
      return Invalid("hstu mix: of ", mix->tokens, " tokens, visible must be (tokens, 3) and ",
                     "offsets (batch + 1,), got ", visible.shape().DebugString(), " and ",
                     offsets.shape().DebugString());
    }
    const int32_t batch = static_cast<int32_t>(offsets.NumElements() - 1);
    TF_RETURN_IF_ERROR(hstu::CheckPlan(plan, mix->tokens, batch));
    GmetaHstuAttention& attention = mix->attention;
    attention = {};
    attention.dtype = kType<T>, attention.batch = batch, attention.tokens = mix->tokens;
    attention.heads = static_cast<int32_t>(heads_);
    attention.width = static_cast<int32_t>(mix->width / heads_);
    attention.alpha = alpha_, attention.scale = scale_;
    attention.visible = visible.flat<int32_t>().data();
    attention.plan = plan.flat<uint8_t>().data();
    TF_RETURN_IF_ERROR(bias_.Read(context, kBias, mix->tokens, &mix->bias));
    attention.bias = mix->bias.get();
    TF_RETURN_IF_ERROR(
        ReadNorm<T>(context, kNormScale, mix->tokens, mix->width, epsilon_, &mix->norm));
    mix->norm.gate = Columns<T>(projected);
    return absl::OkStatus();
  }

  // Sets [v, q, k] for attention: the activated tensor, or parts of `projected`.
  void SetHeads(const Tensor& projected, const Tensor& activated, Mix* mix) const {
    const Tensor& from = production_ ? projected : activated;
    const int64_t v = production_ ? mix->width : 0;
    mix->attention.v = Heads(from, v);
    mix->attention.q = Heads(from, v + mix->width);
    mix->attention.k = Heads(from, v + 2 * mix->width);
  }

  static GmetaHeads Heads(const Tensor& matrix, int64_t from) {
    const GmetaRows rows = Columns<T>(matrix, from);
    return {rows.data, rows.stride};
  }
  // Returns the column where attention's result begins: in the middle of `mixed`, or in a tensor of
  // its own.
  int64_t attended_at(const Mix& mix) const { return production_ ? mix.width : 0; }

  bool production_;

 private:
  int64_t heads_;
  float scale_, alpha_, epsilon_;
  const hstu::GpuBiasReader bias_;
};

template <class T>
class MixOp : public MixBase<T> {
 public:
  using MixBase<T>::MixBase;

  void Compute(OpKernelContext* context) override {
    typename MixBase<T>::Mix mix;
    OP_REQUIRES_OK(context, this->Read(context, &mix));
    const bool production = this->production_;
    const int64_t n = mix.tokens, width = mix.width;
    const TensorShape shapes[] = {
        TensorShape({n, production ? 3 * width : width}),
        production ? TensorShape({0, 0}) : TensorShape({n, width}),
        TensorShape({n, 2}),
        production ? TensorShape({0, 0}) : TensorShape({n, 3 * width}),
    };
    const Tensor &projected = context->input(kProjected), &active = context->input(kActive);
    const bool activate = active.NumElements() == 0;
    OP_REQUIRES(context, activate || active.shape() == shapes[3],
                Invalid("hstu mix: active must have no elements or be ", shapes[3].DebugString(),
                        ", got ", active.shape().DebugString()));
    Tensor* outputs[4] = {};
    for (int i = 0; i < (activate ? 4 : 3); ++i) {
      OP_REQUIRES_OK(context, context->allocate_output(i, shapes[i], &outputs[i]));
    }
    if (!activate) context->set_output(3, active);
    if (n == 0) return;
    Tensor &mixed = *outputs[0], &attended = production ? mixed : *outputs[1];
    const Tensor& activated = activate ? *outputs[3] : active;
    void* const stream = CudaStream(context);
    const int32_t columns = static_cast<int32_t>(width);
    if (production) {
      OP_REQUIRES_OK(context, CudaStatus(gmeta_silu(kType<T>, n, columns, Columns<T>(projected),
                                                    Columns<T>(mixed), stream)));
    } else if (activate) {
      OP_REQUIRES_OK(context,
                     CudaStatus(gmeta_silu(kType<T>, n, 3 * columns, Columns<T>(projected, width),
                                           Columns<T>(activated), stream)));
    }
    this->SetHeads(projected, activated, &mix);
    const int64_t at = this->attended_at(mix);
    OP_REQUIRES_OK(
        context, CudaStatus(gmeta_hstu_forward(&mix.attention, this->Heads(attended, at), stream)));
    mix.norm.x = Columns<T>(attended, at);
    OP_REQUIRES_OK(
        context, CudaStatus(gmeta_row_norm(&mix.norm, Columns<T>(mixed, production ? 2 * width : 0),
                                           Data<float>(*outputs[2]), stream)));
  }
};

template <class T>
class MixGradientOp : public MixBase<T> {
 public:
  using MixBase<T>::MixBase;

  void Compute(OpKernelContext* context) override {
    typename MixBase<T>::Mix mix;
    OP_REQUIRES_OK(context, this->Read(context, &mix));
    const bool production = this->production_;
    const int64_t n = mix.tokens, width = mix.width;
    const Tensor &projected = context->input(kProjected), &of_mixed = context->input(kOfMixed);
    OP_REQUIRES(context, of_mixed.shape() == context->input(kMixed).shape(),
                Invalid("hstu mix: gradients must be of the shape of what was mixed, ",
                        context->input(kMixed).shape().DebugString(), ", got ",
                        of_mixed.shape().DebugString()));
    Tensor* outputs[3];
    const int of[] = {kProjected, kNormScale, kNormOffset};
    for (int i = 0; i < 3; ++i) {
      OP_REQUIRES_OK(context,
                     context->allocate_output(i, context->input(of[i]).shape(), &outputs[i]));
    }
    Tensor room, of_attended;
    hstu::GpuBiasOutput of_bias;
    OP_REQUIRES_OK(context, of_bias.Make(context, mix.attention, kBias, 3));
    OP_REQUIRES_OK(context, Workspace(context, mix.norm, &room));
    OP_REQUIRES_OK(
        context, context->allocate_temp(projected.dtype(), TensorShape({n, width}), &of_attended));
    void* const stream = CudaStream(context);
    const int64_t at = this->attended_at(mix);
    mix.norm.x = Columns<T>(context->input(production ? kMixed : kAttended), at);
    GmetaRowNormGradients to{};
    to.of_y = Columns<T>(of_mixed, production ? 2 * width : 0);
    if (production) to.gate_added = Columns<T>(of_mixed), to.x_added = Columns<T>(of_mixed, width);
    to.of_x = Columns<T>(of_attended), to.of_gate = Columns<T>(*outputs[0]);
    to.of_scale = Data<T>(*outputs[1]), to.of_offset = Data<T>(*outputs[2]);
    to.workspace = Data<uint8_t>(room);
    OP_REQUIRES_OK(context, CudaStatus(gmeta_row_norm_back(
                                &mix.norm, Data<float>(context->input(kStatistics)), &to, stream)));
    this->SetHeads(projected, context->input(kActivated), &mix);
    const Tensor& of_projected = *outputs[0];
    OP_REQUIRES_OK(context,
                   CudaStatus(gmeta_hstu_backward(
                       &mix.attention, this->Heads(of_attended, 0),
                       this->Heads(of_projected, 2 * width), this->Heads(of_projected, 3 * width),
                       this->Heads(of_projected, width), &of_bias.gradient, stream)));
    if (!production) {
      OP_REQUIRES_OK(context,
                     CudaStatus(gmeta_silu_back(kType<T>, n, 3 * static_cast<int32_t>(width),
                                                Columns<T>(projected, width),
                                                Columns<T>(of_projected, width), stream)));
    }
  }
};

GMETA_REGISTER_ROWS_KERNEL("GmetaSiluProjection", SiluProjectionOp);
GMETA_REGISTER_ROWS_KERNEL("GmetaRowNorm", RowNormOp);
GMETA_REGISTER_ROWS_KERNEL("GmetaRowNormGradient", RowNormGradientOp);
GMETA_REGISTER_ROWS_KERNEL("GmetaHstuMix", MixOp);
GMETA_REGISTER_ROWS_KERNEL("GmetaHstuMixGradient", MixGradientOp);

}  // namespace
}  // namespace gmeta
