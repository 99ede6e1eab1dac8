// The CPU kernels of GmetaTrieStep, GmetaTrieLogProbs and its gradient: users, or rows, are shared
// among the threads of TensorFlow's pool.

#include "ops/trie/kernels.h"

#include <cstdint>

#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/log_probs.h"
#include "ops/trie/host/ranks.h"
#include "ops/trie/kernels_ops.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;

constexpr size_t kCyclesPerLogit = 4;

// Runs work(row, siblings), which returns a Problem, for all rows.
template <class Work>
absl::Status ForRows(OpKernelContext* context, const trie::Level& level, const trie::Rows& rows,
                     int64_t n, const Work& work) {
  FirstProblem first;
  const PoolParallelFor parallel_for(context);
  parallel_for(static_cast<size_t>(n), rows.codes * kCyclesPerLogit, [&](size_t begin, size_t end) {
    trie::Siblings siblings;
    for (size_t row = begin; row < end; ++row) {
      const trie::Problem problem = work(row, &siblings);
      if (problem != trie::Problem::kNone) first.Tell(row, 0, problem);
    }
  });
  if (first.problem() == trie::Problem::kNone) return absl::OkStatus();
  const int64_t node = rows.nodes[first.place()], child = rows.children[first.place()];
  if (first.problem() == trie::Problem::kChild) {
    return Invalid("trie_log_probs", ": in row ", first.place(), " node ", node,
                   " has the children ", level.starts[node], " to ", level.starts[node + 1] - 1,
                   ", not ", child, ": give a child of the node, or -1 for none");
  }
  if (first.problem() == trie::Problem::kForbidden) {
    return Invalid("trie_log_probs", ": in row ", first.place(), " the mask forbids child ", child,
                   " of node ", node, ", so it has no probability: allow it, or give -1");
  }
  return Words("trie_log_probs", first.problem(), absl::StrCat("row ", first.place()), level, node,
               static_cast<int64_t>(rows.codes));
}

struct Cpu {
  static absl::Status Step(OpKernelContext* context, const trie::Level& level, const Batch& batch,
                           int64_t k, const NextBatch& next) {
    return ForUsers(
        context, "trie_step", level, batch, [&] { return trie::BeamStep(static_cast<size_t>(k)); },
        [&](trie::BeamStep* step, size_t user) {
          const trie::Beams from = batch.Of(user);
          return step->Run(level, from, trie::ByScore(from.scores), next.Of(user));
        });
  }

  static absl::Status LogProbs(OpKernelContext* context, const trie::Level& level,
                               const trie::Rows& rows, int64_t n, float* to) {
    return ForRows(context, level, rows, n, [&](size_t row, trie::Siblings* siblings) {
      return trie::LogProb(level, rows, row, siblings, to + row);
    });
  }

  static absl::Status Gradient(OpKernelContext* context, const float* of_log_probs,
                               const trie::Level& level, const trie::Rows& rows, int64_t n,
                               float* to) {
    return ForRows(context, level, rows, n, [&](size_t row, trie::Siblings* siblings) {
      return trie::LogProbGradient(level, rows, row, of_log_probs[row], siblings,
                                   to + row * rows.codes);
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieStep").Device(DEVICE_CPU), TrieStepOp<Cpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieLogProbs").Device(DEVICE_CPU), TrieLogProbsOp<Cpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieLogProbsGradient").Device(DEVICE_CPU),
                        TrieLogProbsGradientOp<Cpu>);

}  // namespace
}  // namespace gmeta
