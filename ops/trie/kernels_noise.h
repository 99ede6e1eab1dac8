// The ops GmetaTrieSample and GmetaTrieGumbelStep, which draw by Noise, on any device: their checks
// and their outputs. A device has the functions Sample and GumbelStep, which are called below.

#ifndef GMETA_OPS_TRIE_KERNELS_NOISE_H_
#define GMETA_OPS_TRIE_KERNELS_NOISE_H_

#include <cstdint>

#include "ops/trie/kernels.h"
#include "ops/trie/noise.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

// The noise of a batch. Its numbers are in the device's memory.
struct BatchNoise {
  const int64_t *seed, *step, *keys;
  int64_t level;

  // On the CPU.
  trie::Noise Of(size_t user) const {
    return {static_cast<uint64_t>(*seed), static_cast<uint64_t>(*step),
            static_cast<uint32_t>(level), static_cast<uint64_t>(keys[user])};
  }
};

// Makes the noise of the inputs `seed`, `step` and `keys`, of which `seed` is input number `first`.
inline absl::Status NoiseOf(tensorflow::OpKernelContext* context, int first, const char* op,
                            int64_t users, int64_t level, BatchNoise* noise) {
  const tensorflow::Tensor &seed = context->input(first), &step = context->input(first + 1);
  const tensorflow::Tensor& keys = context->input(first + 2);
  if (seed.dims() != 0 || step.dims() != 0 || keys.shape() != tensorflow::TensorShape({users})) {
    return Invalid(op, ": seed and step must be numbers, keys one for each of ", users,
                   " users, got shapes ", seed.shape().DebugString(), ", ",
                   step.shape().DebugString(), " and ", keys.shape().DebugString());
  }
  *noise = {seed.flat<int64_t>().data(), step.flat<int64_t>().data(), keys.flat<int64_t>().data(),
            level};
  return absl::OkStatus();
}

inline absl::Status GetNoiseLevel(tensorflow::OpKernelConstruction* context, int64_t* level) {
  TF_RETURN_IF_ERROR(context->GetAttr("level", level));
  if (*level < trie::kMostLevels) return absl::OkStatus();
  return Invalid("the level of a trie's noise must be below ", trie::kMostLevels, ", got ", *level);
}

template <class Device>
class TrieSampleOp : public tensorflow::OpKernel {
 public:
  explicit TrieSampleOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, GetNoiseLevel(context, &level_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    Batch batch;
    trie::Level level;
    BatchNoise noise;
    NextBatch next;
    OP_REQUIRES_OK(context, BatchOf(context, "trie_sample", &batch));
    OP_REQUIRES_OK(context, LevelOf(context, 3, "trie_sample", &level));
    OP_REQUIRES_OK(context, NoiseOf(context, 6, "trie_sample", batch.users, level_, &noise));
    OP_REQUIRES_OK(context, next.Allocate(context, batch.users, batch.beams));
    OP_REQUIRES_OK(context, Device::Sample(context, level, batch, noise, next));
  }

 private:
  int64_t level_;
};

template <class Device>
class TrieGumbelStepOp : public tensorflow::OpKernel {
 public:
  explicit TrieGumbelStepOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
    OP_REQUIRES_OK(context, GetNoiseLevel(context, &level_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    constexpr char kName[] = "trie_gumbel_step";
    Batch batch;
    trie::Level level;
    BatchNoise noise;
    NextBatch next;
    OP_REQUIRES_OK(context, BatchOf(context, kName, &batch));
    OP_REQUIRES_OK(context, LevelOf(context, 3, kName, &level));
    OP_REQUIRES_OK(context, NoiseOf(context, 6, kName, batch.users, level_, &noise));
    const tensorflow::Tensor& ranks = context->input(9);
    OP_REQUIRES(
        context, ranks.shape() == context->input(1).shape(),
        Invalid(kName, ": ranks must have the shape of scores, ",
                context->input(1).shape().DebugString(), ", got ", ranks.shape().DebugString()));
    OP_REQUIRES_OK(context, next.Allocate(context, batch.users, k_));
    OP_REQUIRES_OK(context, Device::GumbelStep(context, level, batch, ranks.flat<float>().data(),
                                               noise, k_, next));
  }

 private:
  int64_t k_, level_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TRIE_KERNELS_NOISE_H_
