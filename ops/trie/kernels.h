// Shared by the kernels of tries: a level and a batch of beams as inputs, the next beams as
// outputs, and the messages of errors.

#ifndef GMETA_OPS_TRIE_KERNELS_H_
#define GMETA_OPS_TRIE_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "ops/common/kernels.h"
#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/log_probs.h"
#include "ops/trie/host/siblings.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

// Makes a level of the inputs `starts`, `digits` and `allowed`, of which `starts` is input number
// `first`.
inline absl::Status LevelOf(tensorflow::OpKernelContext* context, int first, const char* op,
                            trie::Level* level) {
  const tensorflow::Tensor& starts = context->input(first);
  const tensorflow::Tensor& digits = context->input(first + 1);
  const tensorflow::Tensor& allowed = context->input(first + 2);
  if (starts.dims() != 1 || starts.NumElements() < 1 || digits.dims() != 1 || allowed.dims() != 1) {
    return Invalid(op, ": starts, digits and allowed must be vectors, starts with a value at ",
                   "least, got ", starts.shape().DebugString(), ", ", digits.shape().DebugString(),
                   " and ", allowed.shape().DebugString());
  }
  if (allowed.NumElements() != 0 && allowed.NumElements() != digits.NumElements()) {
    return Invalid(op, ": the level has ", digits.NumElements(), " children, but ",
                   allowed.NumElements(), " values of allowed: give one for each, or none");
  }
  const bool wide = digits.dtype() == tensorflow::DT_INT64;
  *level = {starts.flat<int64_t>().data(),
            wide ? nullptr : digits.flat<int32_t>().data(),
            allowed.NumElements() == 0 ? nullptr : allowed.flat<bool>().data(),
            starts.NumElements() - 1,
            digits.NumElements(),
            wide ? digits.flat<int64_t>().data() : nullptr};
  return absl::OkStatus();
}

// The beams of users: the inputs `logits`, `scores` and `nodes`, which are the first three.
struct Batch {
  const float *logits, *scores;
  const int64_t* nodes;
  int64_t users, beams, codes;

  trie::Beams Of(size_t user) const {
    const int64_t first = static_cast<int64_t>(user) * beams;
    return {logits + first * codes, scores + first, nodes + first, static_cast<size_t>(beams),
            static_cast<size_t>(codes)};
  }
};

inline absl::Status BatchOf(tensorflow::OpKernelContext* context, const char* op, Batch* batch) {
  const tensorflow::Tensor &logits = context->input(0), &scores = context->input(1);
  const tensorflow::Tensor& nodes = context->input(2);
  if (logits.dims() != 3 || scores.dims() != 2 || logits.dim_size(0) != scores.dim_size(0) ||
      logits.dim_size(1) != scores.dim_size(1) || nodes.shape() != scores.shape()) {
    return Invalid(op, ": logits must be (users, beams, codes), scores and nodes (users, beams), ",
                   "got ", logits.shape().DebugString(), ", ", scores.shape().DebugString(),
                   " and ", nodes.shape().DebugString());
  }
  *batch = {logits.flat<float>().data(), scores.flat<float>().data(), nodes.flat<int64_t>().data(),
            scores.dim_size(0),          scores.dim_size(1),          logits.dim_size(2)};
  return absl::OkStatus();
}

// The next beams, `k` a user: the outputs `next_scores`, `next_nodes`, `beams`, and, if
// the op has a fourth, `next_ranks`.
class NextBatch {
 public:
  absl::Status Allocate(tensorflow::OpKernelContext* context, int64_t users, int64_t k) {
    k_ = k;
    tensorflow::Tensor* outputs[4] = {};
    for (int i = 0; i < context->num_outputs(); ++i) {
      TF_RETURN_IF_ERROR(
          context->allocate_output(i, tensorflow::TensorShape({users, k}), &outputs[i]));
    }
    first_ = {outputs[0]->flat<float>().data(), outputs[1]->flat<int64_t>().data(),
              outputs[2]->flat<int32_t>().data(),
              outputs[3] == nullptr ? nullptr : outputs[3]->flat<float>().data()};
    return absl::OkStatus();
  }

  trie::NextBeams Of(size_t user) const {
    const int64_t at = static_cast<int64_t>(user) * k_;
    return {first_.scores + at, first_.nodes + at, first_.beams + at,
            first_.ranks == nullptr ? nullptr : first_.ranks + at};
  }

 private:
  trie::NextBeams first_;
  int64_t k_;
};

// Makes rows of the inputs `logits`, `nodes` and `children` of trie_log_probs, of which `logits` is
// input number `first`.
inline absl::Status RowsOf(tensorflow::OpKernelContext* context, int first, trie::Rows* rows) {
  const tensorflow::Tensor &logits = context->input(first), &nodes = context->input(first + 1);
  const tensorflow::Tensor& children = context->input(first + 2);
  if (logits.dims() != 2 || nodes.shape() != tensorflow::TensorShape({logits.dim_size(0)}) ||
      children.shape() != nodes.shape()) {
    return Invalid("trie_log_probs: logits must be (n, codes), nodes and children (n,), got ",
                   logits.shape().DebugString(), ", ", nodes.shape().DebugString(), " and ",
                   children.shape().DebugString());
  }
  *rows = {logits.flat<float>().data(), nodes.flat<int64_t>().data(),
           children.flat<int64_t>().data(), static_cast<size_t>(logits.dim_size(1))};
  return absl::OkStatus();
}

// The first of the problems that threads have met.
class FirstProblem {
 public:
  void Tell(size_t place, size_t beam, trie::Problem problem) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (problem_ != trie::Problem::kNone && place_ <= place) return;
    place_ = place, beam_ = beam, problem_ = problem;
  }
  trie::Problem problem() const { return problem_; }
  size_t place() const { return place_; }  // of a user or a row
  size_t beam() const { return beam_; }

 private:
  std::mutex mutex_;
  trie::Problem problem_ = trie::Problem::kNone;
  size_t place_ = 0, beam_ = 0;
};

// Returns the error that describes what is wrong with `whose`, which is at `node`.
template <class Whose>
absl::Status Words(const char* op, trie::Problem problem, const Whose& whose,
                   const trie::Level& level, int64_t node, int64_t codes) {
  switch (problem) {
    case trie::Problem::kNone:
      return absl::OkStatus();
    case trie::Problem::kScore:
      return Invalid(op, ": the score of ", whose, " is NaN: has the model's training diverged?");
    case trie::Problem::kNode:
      return Invalid(op, ": ", whose, " is at node ", node, ", but the level has ", level.nodes,
                     ": is it of another level?");
    case trie::Problem::kChildren:
      return Invalid(op, ": node ", node, " has children ", level.starts[node], " to ",
                     level.starts[node + 1], ", but the level has ", level.children,
                     ": are starts of another level?");
    case trie::Problem::kDigit:
      for (int64_t child = level.starts[node]; child < level.starts[node + 1]; ++child) {
        const int64_t digit =
            level.wide_digits == nullptr ? level.digits[child] : level.wide_digits[child];
        if (digit >= 0 && digit < codes) continue;
        if (level.allowed != nullptr && !level.allowed[child]) continue;
        return Invalid(op, ": child ", child, " has digit ", digit, ", but there are ", codes,
                       " logits for ", whose);
      }
      return absl::InternalError("no digit is out of range any more");
    case trie::Problem::kLogit:
      return Invalid(op, ": the logits of ", whose, " hold NaN or infinity: has the model's ",
                     "training diverged?");
    case trie::Problem::kChild:
    case trie::Problem::kForbidden:
      break;  // reported by the op that takes children
  }
  return absl::InternalError("a problem without words");
}

// About how many cycles a node of a level takes.
inline int64_t CyclesPerNode(const trie::Level& level) {
  return 100 + 3 * level.children / std::max<int64_t>(level.nodes, 1);
}

// Divides users among the threads of TensorFlow's pool. Each piece of work makes its own scratch by
// make(), and does run(&scratch, user), which returns an Outcome.
template <class Make, class Run>
absl::Status ForUsers(tensorflow::OpKernelContext* context, const char* op,
                      const trie::Level& level, const Batch& batch, const Make& make,
                      const Run& run) {
  FirstProblem first;
  const PoolParallelFor parallel_for(context);
  parallel_for(static_cast<size_t>(batch.users),
               static_cast<size_t>(batch.beams * CyclesPerNode(level)),
               [&](size_t begin, size_t end) {
                 auto scratch = make();
                 for (size_t user = begin; user < end; ++user) {
                   const trie::BeamStep::Outcome outcome = run(&scratch, user);
                   if (outcome.problem == trie::Problem::kNone) continue;
                   first.Tell(user, outcome.beam, outcome.problem);
                 }
               });
  if (first.problem() == trie::Problem::kNone) return absl::OkStatus();
  return Words(op, first.problem(), absl::StrCat("beam ", first.beam(), " of user ", first.place()),
               level, batch.Of(first.place()).nodes[first.beam()], batch.codes);
}

}  // namespace gmeta

#endif  // GMETA_OPS_TRIE_KERNELS_H_
