// How the GPU kernels of attention ops read a relative bias and write its gradients. The bias is
// four consecutive inputs, positions, time_buckets, row_times and column_times, and the attribute
// bucket_starts.

#ifndef GMETA_OPS_ATTENTION_KERNELS_GPU_H_
#define GMETA_OPS_ATTENTION_KERNELS_GPU_H_

#include <cstdint>
#include <vector>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/kernels.h"
#include "ops/common/kernels_gpu.h"

namespace gmeta::hstu {

// A bias, and the memory that it needs while a kernel computes.
struct GpuBiasInput {
  GmetaHstuBias bias{};
  tensorflow::Tensor time_table;

  // Returns the pointer that GmetaHstuAttention takes; null if there is no bias.
  const GmetaHstuBias* get() const {
    return bias.positions == nullptr && bias.time_buckets == nullptr ? nullptr : &bias;
  }
};

class GpuBiasReader {
 public:
  explicit GpuBiasReader(tensorflow::OpKernelConstruction* context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket_starts", &starts_));
  }

  // Reads the bias from the inputs that begin at `first`.
  absl::Status Read(tensorflow::OpKernelContext* context, int first, int64_t tokens,
                    GpuBiasInput* to) const {
    TF_RETURN_IF_ERROR(CheckBias(context, first, tokens, static_cast<int64_t>(starts_.size()) + 1));
    const auto& positions = context->input(first);
    const auto& time_buckets = context->input(first + 1);
    GmetaHstuBias* const bias = &to->bias;
    if (positions.NumElements() > 0) {
      bias->positions = positions.flat<float>().data();
      bias->n = (positions.NumElements() + 1) / 2;
    }
    if (time_buckets.NumElements() == 0) return absl::OkStatus();
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_UINT8, tensorflow::TensorShape({gmeta_hstu_time_table_bytes()}),
        &to->time_table));
    void* const table = to->time_table.flat<uint8_t>().data();
    TF_RETURN_IF_ERROR(CudaStatus(gmeta_hstu_time_table(
        starts_.data(), static_cast<int32_t>(starts_.size()), table, CudaStream(context))));
    bias->time_buckets = time_buckets.flat<float>().data();
    bias->buckets = static_cast<int32_t>(time_buckets.NumElements());
    bias->table = table;
    bias->row_times = context->input(first + 2).flat<int64_t>().data();
    bias->column_times = context->input(first + 3).flat<int64_t>().data();
    return absl::OkStatus();
  }

 private:
  std::vector<int64_t> starts_;
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
