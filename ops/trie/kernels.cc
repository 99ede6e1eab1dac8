// The CPU kernel of GmetaTrieStep: it gives each user to a thread of TensorFlow's pool.

#include "ops/trie/kernels.h"

#include <cstdint>

#include "ops/trie/host/beam_step.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using trie::BeamStep;

constexpr size_t kCyclesPerLogit = 4;

absl::Status CheckShapes(OpKernelContext* context) {
  const Tensor &logits = context->input(0), &scores = context->input(1), &nodes = context->input(2);
  if (logits.dims() != 3 || scores.dims() != 2 || logits.dim_size(0) != scores.dim_size(0) ||
      logits.dim_size(1) != scores.dim_size(1) || nodes.shape() != scores.shape()) {
    return Invalid("trie_step: logits must be (users, beams, codes), scores and nodes (users, ",
                   "beams), got ", logits.shape().DebugString(), ", ", scores.shape().DebugString(),
                   " and ", nodes.shape().DebugString());
  }
  return absl::OkStatus();
}

class TrieStepOp : public OpKernel {
 public:
  explicit TrieStepOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, CheckShapes(context));
    trie::Level level;
    OP_REQUIRES_OK(context, LevelOf(context, 3, "trie_step", &level));
    const Tensor &logits = context->input(0), &scores = context->input(1);
    const Tensor& nodes = context->input(2);
    const int64_t users = scores.dim_size(0), beams = scores.dim_size(1);
    const int64_t codes = logits.dim_size(2);
    Tensor *next_scores, *next_nodes, *next_beams;
    const TensorShape shape({users, k_});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &next_scores));
    OP_REQUIRES_OK(context, context->allocate_output(1, shape, &next_nodes));
    OP_REQUIRES_OK(context, context->allocate_output(2, shape, &next_beams));
    const auto beams_of = [&](size_t user) {
      const int64_t first = static_cast<int64_t>(user) * beams;
      return trie::Beams{logits.flat<float>().data() + first * codes,
                         scores.flat<float>().data() + first, nodes.flat<int64_t>().data() + first,
                         static_cast<size_t>(beams), static_cast<size_t>(codes)};
    };
    FirstProblem first;
    const PoolParallelFor parallel_for(context);
    parallel_for(static_cast<size_t>(users), static_cast<size_t>(beams * codes) * kCyclesPerLogit,
                 [&](size_t begin, size_t end) {
                   BeamStep step(static_cast<size_t>(k_));
                   for (size_t user = begin; user < end; ++user) {
                     const int64_t at = static_cast<int64_t>(user) * k_;
                     const BeamStep::Outcome outcome =
                         step.Run(level, beams_of(user),
                                  {next_scores->flat<float>().data() + at,
                                   next_nodes->flat<int64_t>().data() + at,
                                   next_beams->flat<int32_t>().data() + at});
                     if (outcome.problem == trie::Problem::kNone) continue;
                     first.Tell(user, outcome.beam, outcome.problem);
                   }
                 });
    OP_REQUIRES_OK(
        context,
        Words("trie_step", first.problem(),
              absl::StrCat("beam ", first.beam(), " of user ", first.place()), level,
              first.problem() == trie::Problem::kNone ? 0
                                                      : beams_of(first.place()).nodes[first.beam()],
              codes));
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieStep").Device(tensorflow::DEVICE_CPU), TrieStepOp);

}  // namespace
}  // namespace gmeta
