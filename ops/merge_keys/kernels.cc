// The CPU kernel of GmetaMergeKeys.

#include <algorithm>
#include <string>
#include <vector>

#include "ops/merge_keys/merge_keys.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class MergeKeysOp : public OpKernel {
 public:
  explicit MergeKeysOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("features", &features_));
    OP_REQUIRES_OK(context, context->GetAttr("prefixes", &prefixes_));
    OP_REQUIRES_OK(context, context->GetAttr("hashed", &hashed_));
    OP_REQUIRES_OK(context, context->GetAttr("id_bits", &id_bits_));
    OP_REQUIRES_OK(context, context->GetAttr("mix_bits", &mix_bits_));
    const size_t vectors = num_inputs() - 1;
    OP_REQUIRES(
        context,
        features_.size() == vectors && prefixes_.size() == vectors && hashed_.size() == vectors,
        absl::InvalidArgumentError(absl::StrCat(
            "GmetaMergeKeys: ", vectors, " vectors of ids with ", features_.size(), " features, ",
            prefixes_.size(), " prefixes and ", hashed_.size(), " values of hashed")));
    OP_REQUIRES(context, 0 <= id_bits_ && id_bits_ <= 63,
                absl::InvalidArgumentError(
                    absl::StrCat("GmetaMergeKeys: id_bits must be in [0, 63], got ", id_bits_)));
    OP_REQUIRES(context, 1 <= mix_bits_ && mix_bits_ <= 63,
                absl::InvalidArgumentError(
                    absl::StrCat("GmetaMergeKeys: mix_bits must be in [1, 63], got ", mix_bits_)));
  }

  void Compute(OpKernelContext* context) override {
    const bool mix = context->input(0).scalar<bool>()();
    const bool hashes = std::find(hashed_.begin(), hashed_.end(), true) != hashed_.end();
    OP_REQUIRES(context, !(mix && hashes && mix_bits_ > id_bits_),
                absl::InvalidArgumentError(absl::StrCat("GmetaMergeKeys: ids of ", mix_bits_,
                                                        " bits don't fit into ", id_bits_)));
    const int vectors = num_inputs() - 1;
    int64_t total = 0;
    for (int i = 0; i < vectors; ++i) total += context->input(i + 1).NumElements();
    Tensor* keys;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({total}), &keys));
    int64_t* to = keys->flat<int64_t>().data();
    for (int i = 0; i < vectors; ++i) {
      const Tensor& ids = context->input(i + 1);
      OP_REQUIRES_OK(context, ids.dtype() == tensorflow::DT_INT64
                                  ? Merge<int64_t>(i, ids, mix, to)
                                  : Merge<int32_t>(i, ids, mix, to));
      to += ids.NumElements();
    }
  }

 private:
  template <class Id>
  absl::Status Merge(int feature, const Tensor& tensor, bool mix, int64_t* keys) const {
    const Id* ids = tensor.flat<Id>().data();
    const size_t n = tensor.NumElements();
    const int64_t prefix = prefixes_[feature];
    const int id_bits = static_cast<int>(id_bits_), mix_bits = static_cast<int>(mix_bits_);
    if (hashed_[feature]) {
      if (mix) {
        HashKeys(ids, n, prefix, [=](int64_t x) { return MixFold(x, mix_bits); }, keys);
      } else {
        HashKeys(ids, n, prefix, [=](int64_t x) { return XorFold(x, id_bits); }, keys);
      }
      return absl::OkStatus();
    }
    const size_t good = MergeKeys(ids, n, prefix, id_bits, keys);
    if (good == n) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("feature '", features_[feature], "': id ", ids[good], " at position ", good,
                     " of ", n, " is outside [0, ", uint64_t{1} << id_bits_,
                     "): FeatureConfig(..., hash=True) takes any id"));
  }

  std::vector<std::string> features_;
  std::vector<int64_t> prefixes_;
  std::vector<bool> hashed_;
  int64_t id_bits_, mix_bits_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaMergeKeys").Device(tensorflow::DEVICE_CPU), MergeKeysOp);

}  // namespace
}  // namespace gmeta
