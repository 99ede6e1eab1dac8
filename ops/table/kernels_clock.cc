// The kernel that notes the times of a table's steps (core/step_times.h), for lifetimes by a clock.

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/common/kernels.h"
#include "ops/table/core/step_times.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

class NoteStepTimeOp : public OpKernel {
 public:
  explicit NoteStepTimeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("lifetime", &lifetime_));
    OP_REQUIRES_OK(context, context->GetAttr("every", &every_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& pairs = context->input(0);
    OP_REQUIRES(context, TensorShapeUtils::IsMatrix(pairs.shape()) && pairs.dim_size(1) == 2,
                Invalid("pairs of step and time must have shape (n, 2), got ",
                        pairs.shape().DebugString()));
    for (const int i : {1, 2}) {
      OP_REQUIRES(context, TensorShapeUtils::IsScalar(context->input(i).shape()),
                  Invalid("step and seconds must be scalars, got shape ",
                          context->input(i).shape().DebugString()));
    }
    const double seconds = context->input(2).scalar<double>()();
    OP_REQUIRES(context, std::abs(seconds) < kMostSeconds,
                Invalid("the clock of a table returned ", seconds, " seconds, which isn't a time"));
    const int64_t step = context->input(1).scalar<int64_t>()();
    const int64_t time = std::llround(seconds * 1e6);
    std::vector<StepTime> held(static_cast<size_t>(pairs.dim_size(0)));
    const auto values = pairs.flat<int64_t>();
    for (size_t i = 0; i < held.size(); ++i) {
      held[i] = {values(static_cast<int64_t>(2 * i)), values(static_cast<int64_t>(2 * i + 1))};
    }
    StepTimes times(std::move(held));
    const uint64_t turns = times.Note(step, time, lifetime_, every_);
    Tensor *noted, *before, *come;
    const int64_t n = static_cast<int64_t>(times.pairs().size());
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n, 2}), &noted));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &before));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({}), &come));
    auto to = noted->flat<int64_t>();
    for (int64_t i = 0; i < n; ++i) {
      to(2 * i) = times.pairs()[static_cast<size_t>(i)].step;
      to(2 * i + 1) = times.pairs()[static_cast<size_t>(i)].time;
    }
    before->scalar<int64_t>()() = times.Before(time, lifetime_);
    come->scalar<int64_t>()() = static_cast<int64_t>(turns);
  }

 private:
  static constexpr double kMostSeconds = 4e12;  // fits int64 in microseconds, twice

  int64_t lifetime_, every_;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("GmetaNoteStepTime").Device(tensorflow::DEVICE_CPU), NoteStepTimeOp);

}  // namespace gmeta
