// What the kernels of GmetaMergeKeys do on any device: their settings, their checks and their
// output.

#ifndef GMETA_OPS_MERGE_KEYS_KERNELS_H_
#define GMETA_OPS_MERGE_KEYS_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

// The first id that doesn't fit; there is none if `feature` is -1.
struct BadId {
  int feature = -1;
  int64_t position = 0, id = 0;
};

struct MergeSettings {
  std::vector<std::string> features;
  std::vector<int64_t> prefixes;
  std::vector<bool> hashed;
  int64_t id_bits, mix_bits;

  bool hashes() const { return std::find(hashed.begin(), hashed.end(), true) != hashed.end(); }
  bool checks() const { return std::find(hashed.begin(), hashed.end(), false) != hashed.end(); }

  // Reads the op's attributes.
  absl::Status Read(tensorflow::OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("features", &features));
    TF_RETURN_IF_ERROR(context->GetAttr("prefixes", &prefixes));
    TF_RETURN_IF_ERROR(context->GetAttr("hashed", &hashed));
    TF_RETURN_IF_ERROR(context->GetAttr("id_bits", &id_bits));
    TF_RETURN_IF_ERROR(context->GetAttr("mix_bits", &mix_bits));
    const size_t vectors = context->num_inputs() - 1;
    if (features.size() != vectors || prefixes.size() != vectors || hashed.size() != vectors) {
      return Invalid("GmetaMergeKeys: ", vectors, " vectors of ids with ", features.size(),
                     " features, ", prefixes.size(), " prefixes and ", hashed.size(),
                     " values of hashed");
    }
    if (id_bits < 0 || id_bits > 63) {
      return Invalid("GmetaMergeKeys: id_bits must be in [0, 63], got ", id_bits);
    }
    if (mix_bits < 1 || mix_bits > 63) {
      return Invalid("GmetaMergeKeys: mix_bits must be in [1, 63], got ", mix_bits);
    }
    return absl::OkStatus();
  }

  // Begins a call: returns whether it mixes, and the memory of its keys, null if there are none.
  absl::Status Begin(tensorflow::OpKernelContext* context, bool* mix, int64_t** keys) const {
    *mix = context->input(0).scalar<bool>()();
    if (*mix && hashes() && mix_bits > id_bits) {
      return Invalid("GmetaMergeKeys: ids of ", mix_bits, " bits don't fit into ", id_bits);
    }
    int64_t total = 0;
    for (int i = 1; i < context->num_inputs(); ++i) total += context->input(i).NumElements();
    tensorflow::Tensor* output;
    TF_RETURN_IF_ERROR(
        context->allocate_output(0, tensorflow::TensorShape({total}), &output, NearGpu()));
    *keys = total == 0 ? nullptr : output->flat<int64_t>().data();
    return absl::OkStatus();
  }

  // Refuses an id, if there is one.
  absl::Status Refuse(tensorflow::OpKernelContext* context, const BadId& bad) const {
    if (bad.feature < 0) return absl::OkStatus();
    return Invalid("feature '", features[bad.feature], "': id ", bad.id, " at position ",
                   bad.position, " of ", context->input(1 + bad.feature).NumElements(),
                   " is outside [0, ", uint64_t{1} << id_bits,
                   "): FeatureConfig(..., hash=True) takes any id");
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_MERGE_KEYS_KERNELS_H_
