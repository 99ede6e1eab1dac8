// The CPU kernels of GmetaTrieSample and GmetaTrieGumbelStep, which draw by Noise.

#include <cstdint>

#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/ranks.h"
#include "ops/trie/host/sample.h"
#include "ops/trie/kernels.h"
#include "ops/trie/noise.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The noise of a batch: the inputs `seed`, `step` and `keys`, which are `first` and the next.
class BatchNoise {
 public:
  absl::Status Read(OpKernelContext* context, int first, const char* op, int64_t users,
                    int64_t level) {
    const Tensor &seed = context->input(first), &step = context->input(first + 1);
    const Tensor& keys = context->input(first + 2);
    if (seed.dims() != 0 || step.dims() != 0 || keys.shape() != TensorShape({users})) {
      return Invalid(op, ": seed and step must be numbers, keys one for each of ", users,
                     " users, got shapes ", seed.shape().DebugString(), ", ",
                     step.shape().DebugString(), " and ", keys.shape().DebugString());
    }
    seed_ = static_cast<uint64_t>(seed.scalar<int64_t>()());
    step_ = static_cast<uint64_t>(step.scalar<int64_t>()());
    keys_ = keys.flat<int64_t>().data();
    level_ = static_cast<uint32_t>(level);
    return absl::OkStatus();
  }

  trie::Noise Of(size_t user) const {
    return {seed_, step_, level_, static_cast<uint64_t>(keys_[user])};
  }

 private:
  uint64_t seed_, step_;
  const int64_t* keys_;
  uint32_t level_;
};

class TrieSampleOp : public OpKernel {
 public:
  explicit TrieSampleOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("level", &level_));
  }

  void Compute(OpKernelContext* context) override {
    Batch batch;
    trie::Level level;
    BatchNoise noise;
    NextBatch next;
    OP_REQUIRES_OK(context, BatchOf(context, "trie_sample", &batch));
    OP_REQUIRES_OK(context, LevelOf(context, 3, "trie_sample", &level));
    OP_REQUIRES_OK(context, noise.Read(context, 6, "trie_sample", batch.users, level_));
    OP_REQUIRES_OK(context, next.Allocate(context, batch.users, batch.beams));
    OP_REQUIRES_OK(context,
                   ForUsers(
                       context, "trie_sample", level, batch, [] { return trie::Siblings(); },
                       [&](trie::Siblings* siblings, size_t user) {
                         return trie::Sample(level, batch.Of(user), noise.Of(user), siblings,
                                             next.Of(user));
                       }));
  }

 private:
  int64_t level_;
};

class TrieGumbelStepOp : public OpKernel {
 public:
  explicit TrieGumbelStepOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
    OP_REQUIRES_OK(context, context->GetAttr("level", &level_));
  }

  void Compute(OpKernelContext* context) override {
    Batch batch;
    trie::Level level;
    BatchNoise noise;
    NextBatch next;
    OP_REQUIRES_OK(context, BatchOf(context, kName, &batch));
    OP_REQUIRES_OK(context, LevelOf(context, 3, kName, &level));
    OP_REQUIRES_OK(context, noise.Read(context, 6, kName, batch.users, level_));
    const Tensor& ranks = context->input(9);
    OP_REQUIRES(
        context, ranks.shape() == context->input(1).shape(),
        Invalid(kName, ": ranks must have the shape of scores, ",
                context->input(1).shape().DebugString(), ", got ", ranks.shape().DebugString()));
    OP_REQUIRES_OK(context, next.Allocate(context, batch.users, k_));
    const float* const first = ranks.flat<float>().data();
    OP_REQUIRES_OK(
        context,
        ForUsers(
            context, kName, level, batch, [&] { return trie::BeamStep(static_cast<size_t>(k_)); },
            [&](trie::BeamStep* step, size_t user) {
              const float* const of_user = first + static_cast<int64_t>(user) * batch.beams;
              return step->Run(level, batch.Of(user), trie::ByGumbel(of_user, noise.Of(user)),
                               next.Of(user));
            }));
  }

 private:
  static constexpr char kName[] = "trie_gumbel_step";
  int64_t k_, level_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieSample").Device(tensorflow::DEVICE_CPU), TrieSampleOp);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieGumbelStep").Device(tensorflow::DEVICE_CPU),
                        TrieGumbelStepOp);

}  // namespace
}  // namespace gmeta
