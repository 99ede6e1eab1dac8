// How the GPU kernels of attention ops read a relative bias and write its gradients. The bias is
// five consecutive inputs, positions, time_buckets, row_times, column_times and time_map, and the
// attribute bucket_starts.

#ifndef GMETA_OPS_ATTENTION_KERNELS_GPU_H_
#define GMETA_OPS_ATTENTION_KERNELS_GPU_H_

#include <cstdint>
#include <vector>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/kernels.h"
#include "ops/common/kernels_gpu.h"

namespace gmeta::hstu {

// Refuses what can't be a plan of so many tokens and sequences, by its size.
inline absl::Status CheckPlan(const tensorflow::Tensor& plan, int64_t tokens, int32_t batch) {
  if (plan.NumElements() == gmeta_hstu_plan_bytes(tokens, batch)) return absl::OkStatus();
  return Invalid("attention: the plan isn't one of GmetaHstuPlan on a GPU for ", tokens,
                 " tokens and ", batch, " sequences: it has ", plan.NumElements(), " bytes");
}

struct GpuBiasInput {
  GmetaHstuBias bias{};

  // Returns the pointer that GmetaHstuAttention takes; null if there is no bias.
  const GmetaHstuBias* get() const {
    return bias.positions == nullptr && bias.time_buckets == nullptr ? nullptr : &bias;
  }
};

class GpuBiasReader {
 public:
  explicit GpuBiasReader(tensorflow::OpKernelConstruction* context) {
    std::vector<int64_t> starts;
    OP_REQUIRES_OK(context, context->GetAttr("bucket_starts", &starts));
    buckets_ = static_cast<int64_t>(starts.size()) + 1;
  }

  // Reads the bias from the inputs that begin at `first`.
  absl::Status Read(tensorflow::OpKernelContext* context, int first, int64_t tokens,
                    GpuBiasInput* to) const {
    TF_RETURN_IF_ERROR(CheckBias(context, first, tokens, buckets_));
    const auto& positions = context->input(first);
    const auto& time_buckets = context->input(first + 1);
    GmetaHstuBias* const bias = &to->bias;
    if (positions.NumElements() > 0) {
      bias->positions = positions.flat<float>().data();
      bias->n = (positions.NumElements() + 1) / 2;
    }
    if (time_buckets.NumElements() == 0) return absl::OkStatus();
    const auto& map = context->input(first + 4);
    if (tokens > 0 && map.NumElements() == 0) {
      return Invalid("attention: a bias of times needs the time_map of GmetaHstuTimeMap on a GPU");
    }
    bias->time_buckets = time_buckets.flat<float>().data();
    bias->buckets = static_cast<int32_t>(time_buckets.NumElements());
    bias->time_map = map.flat<uint8_t>().data();
    return absl::OkStatus();
  }

 private:
  int64_t buckets_;
};

// The gradients of an attention's bias, written to outputs `first` and `first` + 1.
struct GpuBiasOutput {
  GmetaHstuBiasGradient gradient{};
  tensorflow::Tensor workspace;

  // Allocates the outputs and the workspace. `input` is the bias's first input.
  absl::Status Make(tensorflow::OpKernelContext* context, const GmetaHstuAttention& attention,
                    int input, int first) {
    tensorflow::Tensor* tables[2];
    for (int i = 0; i < 2; ++i) {
      TF_RETURN_IF_ERROR(
          context->allocate_output(first + i, context->input(input + i).shape(), &tables[i]));
    }
    if (attention.bias == nullptr) return absl::OkStatus();
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_UINT8, tensorflow::TensorShape({gmeta_hstu_bias_workspace(&attention)}),
        &workspace));
    gradient = {tables[0]->flat<float>().data(), tables[1]->flat<float>().data(),
                workspace.flat<uint8_t>().data()};
    return absl::OkStatus();
  }
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_KERNELS_GPU_H_
