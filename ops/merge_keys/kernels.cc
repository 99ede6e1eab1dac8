// The CPU kernel of GmetaMergeKeys.

#include "ops/merge_keys/kernels.h"

#include "ops/merge_keys/merge_keys.h"

namespace gmeta {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <class Id>
void MergeFeature(const MergeSettings& settings, int feature, const Tensor& tensor, bool mix,
                  int64_t* keys, BadId* bad) {
  const Id* ids = tensor.flat<Id>().data();
  const size_t n = tensor.NumElements();
  const int64_t prefix = settings.prefixes[feature];
  const int id_bits = static_cast<int>(settings.id_bits);
  const int mix_bits = static_cast<int>(settings.mix_bits);
  if (settings.hashed[feature]) {
    if (mix) {
      HashKeys(ids, n, prefix, [=](int64_t x) { return MixFold(x, mix_bits); }, keys);
    } else {
      HashKeys(ids, n, prefix, [=](int64_t x) { return XorFold(x, id_bits); }, keys);
    }
    return;
  }
  const size_t good = MergeKeys(ids, n, prefix, id_bits, keys);
  if (good != n) *bad = {feature, static_cast<int64_t>(good), static_cast<int64_t>(ids[good])};
}

class HostMergeKeysOp : public tensorflow::OpKernel {
 public:
  explicit HostMergeKeysOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, settings_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    bool mix = false;
    int64_t* keys = nullptr;
    OP_REQUIRES_OK(context, settings_.Begin(context, &mix, &keys));
    if (keys == nullptr) return;
    const size_t vectors = static_cast<size_t>(context->num_inputs()) - 1;
    std::vector<int64_t*> to(vectors, keys);
    for (size_t i = 1; i < vectors; ++i) {
      to[i] = to[i - 1] + context->input(static_cast<int>(i)).NumElements();
    }
    const size_t total = to.back() - keys + context->input(context->num_inputs() - 1).NumElements();
    std::vector<BadId> found(vectors);
    PoolParallelFor parallel_for(context);
    parallel_for(vectors, 1 + total / vectors, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        const int feature = static_cast<int>(i);
        const Tensor& ids = context->input(feature + 1);
        const bool wide = ids.dtype() == tensorflow::DT_INT64;
        (wide ? MergeFeature<int64_t> : MergeFeature<int32_t>)(settings_, feature, ids, mix, to[i],
                                                               &found[i]);
      }
    });
    const auto first = std::find_if(found.begin(), found.end(),
                                    [](const BadId& each) { return each.feature >= 0; });
    if (first != found.end()) OP_REQUIRES_OK(context, settings_.Refuse(context, *first));
  }

 private:
  MergeSettings settings_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaMergeKeys").Device(tensorflow::DEVICE_CPU), HostMergeKeysOp);

}  // namespace
}  // namespace gmeta
