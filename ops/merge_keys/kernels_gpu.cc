// The GPU kernel of GmetaMergeKeys. It waits for the place of the first id that doesn't fit, unless
// all features are hashed.

#include "ops/common/kernels_gpu.h"

#include <vector>

#include "ops/merge_keys/gpu/merge_keys_abi.h"
#include "ops/merge_keys/kernels.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

struct GpuMerger {
  static absl::Status Merge(OpKernelContext* context, const MergeSettings& settings, bool mix,
                            int64_t* keys, BadId* bad) {
    std::vector<gmeta_gpu_feature_ids> features;
    for (int i = 0; i + 1 < context->num_inputs(); ++i) {
      const Tensor& ids = context->input(i + 1);
      features.push_back({ids.tensor_data().data(), ids.NumElements(), settings.prefixes[i],
                          ids.dtype() == tensorflow::DT_INT64, settings.hashed[i]});
    }
    Tensor place, found;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, TensorShape({1}), &place));
    TF_RETURN_IF_ERROR(CudaStatus(gmeta_gpu_merge_keys(
        features.data(), static_cast<int64_t>(features.size()),
        static_cast<int32_t>(settings.id_bits), mix, static_cast<int32_t>(settings.mix_bits), keys,
        place.flat<int64_t>().data(), CudaStream(context))));
    if (!settings.checks()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(ReadBack(context, place, &found));
    int64_t at = found.flat<int64_t>()(0);
    if (at < 0) return absl::OkStatus();
    int feature = 0;
    for (; at >= features[feature].n; ++feature) at -= features[feature].n;
    Tensor id;
    TF_RETURN_IF_ERROR(ReadBack(context, context->input(feature + 1).Slice(at, at + 1), &id));
    const bool wide = id.dtype() == tensorflow::DT_INT64;
    *bad = {feature, at, wide ? id.flat<int64_t>()(0) : id.flat<int32_t>()(0)};
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaMergeKeys").Device(tensorflow::DEVICE_GPU).HostMemory("mix"),
                        MergeKeysOp<GpuMerger>);

}  // namespace
}  // namespace gmeta
