// The CPU kernel of GmetaTrieStep.

#include "ops/trie/kernels.h"

#include <cstdint>

#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/ranks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class TrieStepOp : public OpKernel {
 public:
  explicit TrieStepOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
  }

  void Compute(OpKernelContext* context) override {
    Batch batch;
    trie::Level level;
    NextBatch next;
    OP_REQUIRES_OK(context, BatchOf(context, "trie_step", &batch));
    OP_REQUIRES_OK(context, LevelOf(context, 3, "trie_step", &level));
    OP_REQUIRES_OK(context, next.Allocate(context, batch.users, k_));
    OP_REQUIRES_OK(context, ForUsers(
                                context, "trie_step", level, batch,
                                [&] { return trie::BeamStep(static_cast<size_t>(k_)); },
                                [&](trie::BeamStep* step, size_t user) {
                                  const trie::Beams from = batch.Of(user);
                                  return step->Run(level, from, trie::ByScore(from.scores),
                                                   next.Of(user));
                                }));
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieStep").Device(tensorflow::DEVICE_CPU), TrieStepOp);

}  // namespace
}  // namespace gmeta
