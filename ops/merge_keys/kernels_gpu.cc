// The GPU kernel of GmetaMergeKeys. Unless all features are hashed, the host must know the place of
// the first id that doesn't fit, so the kernel runs beside the compute stream.

#include <memory>
#include <utility>
#include <vector>

#include "ops/common/kernels_beside.h"
#include "ops/merge_keys/gpu/merge_keys_abi.h"
#include "ops/merge_keys/kernels.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class GpuMergeKeysOp : public tensorflow::AsyncOpKernel {
 public:
  explicit GpuMergeKeysOp(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, settings_.Read(context));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    bool mix = false;
    int64_t* keys = nullptr;
    OP_REQUIRES_OK_ASYNC(context, settings_.Begin(context, &mix, &keys), done);
    if (keys == nullptr) return done();
    const auto work = std::make_shared<Work>();
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_temp(tensorflow::DT_INT64, TensorShape({1}), &work->place),
        done);
    if (!settings_.checks()) {
      OP_REQUIRES_OK_ASYNC(context, Merge(context, mix, keys, &work->place, CudaStream(context)),
                           done);
      return done();
    }
    const auto begin = [&](SideStream* side) {
      TF_RETURN_IF_ERROR(
          context->allocate_temp(tensorflow::DT_INT64, TensorShape({1}), &work->found, Pinned()));
      TF_RETURN_IF_ERROR(CudaStatus(side->Follow()));
      TF_RETURN_IF_ERROR(Merge(context, mix, keys, &work->place, side->stream()));
      return CopyBeside(work->place, *side, &work->found);
    };
    RunBeside(
        context, begin, [this, context, work] { return Check(context, work->found); },
        std::move(done));
  }

 private:
  struct Work {
    Tensor place, found;
  };

  absl::Status Merge(OpKernelContext* context, bool mix, int64_t* keys, Tensor* place,
                     void* stream) const {
    std::vector<gmeta_gpu_feature_ids> features;
    for (int i = 0; i + 1 < context->num_inputs(); ++i) {
      const Tensor& ids = context->input(i + 1);
      features.push_back({ids.tensor_data().data(), ids.NumElements(), settings_.prefixes[i],
                          ids.dtype() == tensorflow::DT_INT64, settings_.hashed[i]});
    }
    return CudaStatus(gmeta_gpu_merge_keys(features.data(), static_cast<int64_t>(features.size()),
                                           static_cast<int32_t>(settings_.id_bits), mix,
                                           static_cast<int32_t>(settings_.mix_bits), keys,
                                           place->flat<int64_t>().data(), stream));
  }

  absl::Status Check(OpKernelContext* context, const Tensor& found) const {
    int64_t at = found.flat<int64_t>()(0);
    if (at < 0) return absl::OkStatus();
    int feature = 0;
    for (; at >= context->input(feature + 1).NumElements(); ++feature) {
      at -= context->input(feature + 1).NumElements();
    }
    Tensor id;
    TF_RETURN_IF_ERROR(ReadBack(context, context->input(feature + 1).Slice(at, at + 1), &id));
    const bool wide = id.dtype() == tensorflow::DT_INT64;
    return settings_.Refuse(context,
                            {feature, at, wide ? id.flat<int64_t>()(0) : id.flat<int32_t>()(0)});
  }

  MergeSettings settings_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaMergeKeys").Device(tensorflow::DEVICE_GPU).HostMemory("mix"),
                        GpuMergeKeysOp);

}  // namespace
}  // namespace gmeta
