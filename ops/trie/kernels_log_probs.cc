// The CPU kernels of GmetaTrieLogProbs and its gradient: rows are shared among the threads of
// TensorFlow's pool.

#include <cstdint>

#include "ops/trie/host/log_probs.h"
#include "ops/trie/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr char kName[] = "trie_log_probs";
constexpr size_t kCyclesPerLogit = 4;

// Reads the inputs logits, nodes and children, which are `first` and the next.
absl::Status RowsOf(OpKernelContext* context, int first, trie::Rows* rows) {
  const Tensor &logits = context->input(first), &nodes = context->input(first + 1);
  const Tensor& children = context->input(first + 2);
  if (logits.dims() != 2 || nodes.shape() != TensorShape({logits.dim_size(0)}) ||
      children.shape() != nodes.shape()) {
    return Invalid(kName, ": logits must be (n, codes), nodes and children (n,), got ",
                   logits.shape().DebugString(), ", ", nodes.shape().DebugString(), " and ",
                   children.shape().DebugString());
  }
  *rows = {logits.flat<float>().data(), nodes.flat<int64_t>().data(),
           children.flat<int64_t>().data(), static_cast<size_t>(logits.dim_size(1))};
  return absl::OkStatus();
}

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
    return Invalid(kName, ": in row ", first.place(), " node ", node, " has the children ",
                   level.starts[node], " to ", level.starts[node + 1] - 1, ", not ", child,
                   ": give a child of the node, or -1 for none");
  }
  if (first.problem() == trie::Problem::kForbidden) {
    return Invalid(kName, ": in row ", first.place(), " the mask forbids child ", child,
                   " of node ", node, ", so it has no probability: allow it, or give -1");
  }
  return Words(kName, first.problem(), absl::StrCat("row ", first.place()), level, node,
               static_cast<int64_t>(rows.codes));
}

class TrieLogProbsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    trie::Rows rows;
    trie::Level level;
    OP_REQUIRES_OK(context, RowsOf(context, 0, &rows));
    OP_REQUIRES_OK(context, LevelOf(context, 3, kName, &level));
    const int64_t n = context->input(0).dim_size(0);
    Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n}), &out));
    float* const to = out->flat<float>().data();
    OP_REQUIRES_OK(context,
                   ForRows(context, level, rows, n, [&](size_t row, trie::Siblings* siblings) {
                     return trie::LogProb(level, rows, row, siblings, to + row);
                   }));
  }
};

class TrieLogProbsGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    trie::Rows rows;
    trie::Level level;
    OP_REQUIRES_OK(context, RowsOf(context, 1, &rows));
    OP_REQUIRES_OK(context, LevelOf(context, 4, kName, &level));
    const Tensor &of_log_probs = context->input(0), &logits = context->input(1);
    const int64_t n = logits.dim_size(0);
    OP_REQUIRES(context, of_log_probs.shape() == TensorShape({n}),
                Invalid(kName, ": the gradient of ", n, " rows has shape ",
                        of_log_probs.shape().DebugString()));
    Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, logits.shape(), &out));
    const float* const from = of_log_probs.flat<float>().data();
    float* const to = out->flat<float>().data();
    OP_REQUIRES_OK(context,
                   ForRows(context, level, rows, n, [&](size_t row, trie::Siblings* siblings) {
                     return trie::LogProbGradient(level, rows, row, from[row], siblings,
                                                  to + row * rows.codes);
                   }));
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieLogProbs").Device(tensorflow::DEVICE_CPU), TrieLogProbsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieLogProbsGradient").Device(tensorflow::DEVICE_CPU),
                        TrieLogProbsGradientOp);

}  // namespace
}  // namespace gmeta
