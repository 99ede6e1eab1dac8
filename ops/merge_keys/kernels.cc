// The CPU kernel of GmetaMergeKeys.

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
    OP_REQUIRES_OK(context, context->GetAttr("id_bits", &id_bits_));
    const size_t inputs = num_inputs();
    OP_REQUIRES(context, features_.size() == inputs && prefixes_.size() == inputs,
                absl::InvalidArgumentError(absl::StrCat(
                    "GmetaMergeKeys: ", inputs, " vectors of ids with ", features_.size(),
                    " features and ", prefixes_.size(), " prefixes")));
    OP_REQUIRES(context, 0 <= id_bits_ && id_bits_ <= 63,
                absl::InvalidArgumentError(
                    absl::StrCat("GmetaMergeKeys: id_bits must be in [0, 63], got ", id_bits_)));
  }

  void Compute(OpKernelContext* context) override {
    int64_t total = 0;
    for (int i = 0; i < num_inputs(); ++i) total += context->input(i).NumElements();
    Tensor* keys;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({total}), &keys));
    int64_t* to = keys->flat<int64_t>().data();
    for (int i = 0; i < num_inputs(); ++i) {
      const Tensor& ids = context->input(i);
      OP_REQUIRES_OK(context, ids.dtype() == tensorflow::DT_INT64 ? Merge<int64_t>(i, ids, to)
                                                                  : Merge<int32_t>(i, ids, to));
      to += ids.NumElements();
    }
  }

 private:
  template <class Id>
  absl::Status Merge(int feature, const Tensor& tensor, int64_t* keys) const {
    const Id* ids = tensor.flat<Id>().data();
    const size_t n = tensor.NumElements();
    const size_t good = MergeKeys(ids, n, prefixes_[feature], static_cast<int>(id_bits_), keys);
    if (good == n) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("feature '", features_[feature], "': id ", ids[good], " at position ", good,
                     " of ", n, " is outside [0, ", uint64_t{1} << id_bits_,
                     "): FeatureConfig(..., hash=True) takes any id"));
  }

  std::vector<std::string> features_;
  std::vector<int64_t> prefixes_;
  int64_t id_bits_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaMergeKeys").Device(tensorflow::DEVICE_CPU), MergeKeysOp);

}  // namespace
}  // namespace gmeta
