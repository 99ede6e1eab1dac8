// The CPU kernel of GmetaTrieStep. It checks its inputs, and gives each user to a thread of
// TensorFlow's pool.

#include "ops/common/kernels.h"

#include <atomic>
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

constexpr size_t kCyclesPerLogit = 20;

absl::Status CheckShapes(OpKernelContext* context) {
  const Tensor &logits = context->input(0), &scores = context->input(1);
  const Tensor &nodes = context->input(2), &starts = context->input(3);
  const Tensor &digits = context->input(4), &allowed = context->input(5);
  if (logits.dims() != 3 || scores.dims() != 2 || logits.dim_size(0) != scores.dim_size(0) ||
      logits.dim_size(1) != scores.dim_size(1) || nodes.shape() != scores.shape()) {
    return Invalid("trie_step: logits must be (users, beams, codes), scores and nodes (users, ",
                   "beams), got ", logits.shape().DebugString(), ", ", scores.shape().DebugString(),
                   " and ", nodes.shape().DebugString());
  }
  if (starts.dims() != 1 || starts.NumElements() < 1 || digits.dims() != 1 || allowed.dims() != 1) {
    return Invalid("trie_step: starts, digits and allowed must be vectors, starts with a value at ",
                   "least, got ", starts.shape().DebugString(), ", ", digits.shape().DebugString(),
                   " and ", allowed.shape().DebugString());
  }
  if (allowed.NumElements() != 0 && allowed.NumElements() != digits.NumElements()) {
    return Invalid("trie_step: the level has ", digits.NumElements(), " children, but ",
                   allowed.NumElements(), " values of allowed: give one for each, or none");
  }
  return absl::OkStatus();
}

// Checks that the nodes of beams, their children and the digits of these are there.
absl::Status CheckNodes(const trie::Level& level, const trie::Beams& from, int64_t user) {
  for (size_t i = 0; i < from.beams; ++i) {
    const int64_t node = from.nodes[i];
    if (node < 0) continue;
    if (node >= level.nodes) {
      return Invalid("trie_step: beam ", i, " of user ", user, " is at node ", node,
                     ", but the level has ", level.nodes, ": are these beams of another level?");
    }
    const int64_t first = level.starts[node], last = level.starts[node + 1];
    if (first < 0 || last < first || last > level.children) {
      return Invalid("trie_step: node ", node, " has children ", first, " to ", last,
                     ", but the level has ", level.children, ": are starts of another level?");
    }
    for (int64_t child = first; child < last; ++child) {
      const int64_t digit = level.digits[child];
      if (digit < 0 || digit >= static_cast<int64_t>(from.codes)) {
        return Invalid("trie_step: child ", child, " has digit ", digit, ", but there are ",
                       from.codes, " logits a beam");
      }
    }
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
    const Tensor &logits = context->input(0), &scores = context->input(1);
    const Tensor &nodes = context->input(2), &starts = context->input(3);
    const Tensor &digits = context->input(4), &allowed = context->input(5);
    const int64_t users = scores.dim_size(0), beams = scores.dim_size(1);
    const int64_t codes = logits.dim_size(2);
    Tensor *next_scores, *next_nodes, *next_beams;
    const TensorShape shape({users, k_});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &next_scores));
    OP_REQUIRES_OK(context, context->allocate_output(1, shape, &next_nodes));
    OP_REQUIRES_OK(context, context->allocate_output(2, shape, &next_beams));
    const trie::Level level{starts.flat<int64_t>().data(), digits.flat<int32_t>().data(),
                            allowed.NumElements() == 0 ? nullptr : allowed.flat<bool>().data(),
                            starts.NumElements() - 1, digits.NumElements()};
    const auto beams_of = [&](int64_t user) {
      return trie::Beams{logits.flat<float>().data() + user * beams * codes,
                         scores.flat<float>().data() + user * beams,
                         nodes.flat<int64_t>().data() + user * beams, static_cast<size_t>(beams),
                         static_cast<size_t>(codes)};
    };
    for (int64_t user = 0; user < users; ++user) {
      OP_REQUIRES_OK(context, CheckNodes(level, beams_of(user), user));
    }
    std::atomic<int64_t> wrong_user{-1}, wrong_beam{-1};
    const PoolParallelFor parallel_for(context);
    parallel_for(static_cast<size_t>(users), static_cast<size_t>(beams * codes) * kCyclesPerLogit,
                 [&](size_t begin, size_t end) {
                   BeamStep step(static_cast<size_t>(k_));
                   for (size_t user = begin; user < end; ++user) {
                     const int64_t at = static_cast<int64_t>(user) * k_;
                     const size_t beam = step.Run(level, beams_of(static_cast<int64_t>(user)),
                                                  {next_scores->flat<float>().data() + at,
                                                   next_nodes->flat<int64_t>().data() + at,
                                                   next_beams->flat<int32_t>().data() + at});
                     if (beam == BeamStep::kFine) continue;
                     wrong_beam = static_cast<int64_t>(beam);
                     wrong_user = static_cast<int64_t>(user);
                   }
                 });
    OP_REQUIRES(context, wrong_user < 0,
                Invalid("trie_step: the logits of beam ", wrong_beam.load(), " of user ",
                        wrong_user.load(), " hold NaN: has the model's training diverged?"));
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieStep").Device(tensorflow::DEVICE_CPU), TrieStepOp);

}  // namespace
}  // namespace gmeta
