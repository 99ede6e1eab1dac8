// Shared by the kernels of tries: a level as three inputs, and the words for what is wrong.

#ifndef GMETA_OPS_TRIE_KERNELS_H_
#define GMETA_OPS_TRIE_KERNELS_H_

#include <cstdint>

#include "ops/common/kernels.h"
#include "ops/trie/host/siblings.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/mutex.h"

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
  *level = {starts.flat<int64_t>().data(), digits.flat<int32_t>().data(),
            allowed.NumElements() == 0 ? nullptr : allowed.flat<bool>().data(),
            starts.NumElements() - 1, digits.NumElements()};
  return absl::OkStatus();
}

// The first of the problems that threads have met.
class FirstProblem {
 public:
  void Tell(size_t place, size_t beam, trie::Problem problem) {
    tensorflow::mutex_lock lock(mutex_);
    if (problem_ != trie::Problem::kNone && place_ <= place) return;
    place_ = place, beam_ = beam, problem_ = problem;
  }
  trie::Problem problem() const { return problem_; }
  size_t place() const { return place_; }  // of a user or a row
  size_t beam() const { return beam_; }

 private:
  tensorflow::mutex mutex_;
  trie::Problem problem_ = trie::Problem::kNone;
  size_t place_ = 0, beam_ = 0;
};

// Says what is wrong with `whose`, which stands at `node`.
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
        const int64_t digit = level.digits[child];
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
      break;  // told by the op that is given children
  }
  return absl::InternalError("a problem without words");
}

}  // namespace gmeta

#endif  // GMETA_OPS_TRIE_KERNELS_H_
