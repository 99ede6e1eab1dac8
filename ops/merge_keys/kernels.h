// The op GmetaMergeKeys on any device: its settings, its checks and its output. A merger has
//   Merge(context, settings, mix, keys, bad)
// which writes all keys, and to `bad` the first id that doesn't fit; it leaves bad.feature at -1 if
// all fit.

#ifndef GMETA_OPS_MERGE_KEYS_KERNELS_H_
#define GMETA_OPS_MERGE_KEYS_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

struct MergeSettings {
  std::vector<std::string> features;
  std::vector<int64_t> prefixes;
  std::vector<bool> hashed;
  int64_t id_bits, mix_bits;

  bool hashes() const { return std::find(hashed.begin(), hashed.end(), true) != hashed.end(); }
  bool checks() const { return std::find(hashed.begin(), hashed.end(), false) != hashed.end(); }
};

struct BadId {
  int feature = -1;
  int64_t position = 0, id = 0;
};

template <class Merger>
class MergeKeysOp : public tensorflow::OpKernel {
 public:
  explicit MergeKeysOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    MergeSettings& own = settings_;
    OP_REQUIRES_OK(context, context->GetAttr("features", &own.features));
    OP_REQUIRES_OK(context, context->GetAttr("prefixes", &own.prefixes));
    OP_REQUIRES_OK(context, context->GetAttr("hashed", &own.hashed));
    OP_REQUIRES_OK(context, context->GetAttr("id_bits", &own.id_bits));
    OP_REQUIRES_OK(context, context->GetAttr("mix_bits", &own.mix_bits));
    const size_t vectors = num_inputs() - 1;
    OP_REQUIRES(context,
                own.features.size() == vectors && own.prefixes.size() == vectors &&
                    own.hashed.size() == vectors,
                Invalid("GmetaMergeKeys: ", vectors, " vectors of ids with ", own.features.size(),
                        " features, ", own.prefixes.size(), " prefixes and ", own.hashed.size(),
                        " values of hashed"));
    OP_REQUIRES(context, 0 <= own.id_bits && own.id_bits <= 63,
                Invalid("GmetaMergeKeys: id_bits must be in [0, 63], got ", own.id_bits));
    OP_REQUIRES(context, 1 <= own.mix_bits && own.mix_bits <= 63,
                Invalid("GmetaMergeKeys: mix_bits must be in [1, 63], got ", own.mix_bits));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const MergeSettings& own = settings_;
    const bool mix = context->input(0).scalar<bool>()();
    OP_REQUIRES(
        context, !(mix && own.hashes() && own.mix_bits > own.id_bits),
        Invalid("GmetaMergeKeys: ids of ", own.mix_bits, " bits don't fit into ", own.id_bits));
    int64_t total = 0;
    for (int i = 1; i < num_inputs(); ++i) total += context->input(i).NumElements();
    tensorflow::Tensor* keys;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, tensorflow::TensorShape({total}), &keys, NearGpu()));
    if (total == 0) return;
    BadId bad;
    OP_REQUIRES_OK(context, Merger::Merge(context, own, mix, keys->flat<int64_t>().data(), &bad));
    OP_REQUIRES(
        context, bad.feature < 0,
        Invalid("feature '", own.features[std::max(bad.feature, 0)], "': id ", bad.id,
                " at position ", bad.position, " of ",
                context->input(1 + std::max(bad.feature, 0)).NumElements(), " is outside [0, ",
                uint64_t{1} << own.id_bits, "): FeatureConfig(..., hash=True) takes any id"));
  }

 private:
  MergeSettings settings_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_MERGE_KEYS_KERNELS_H_
