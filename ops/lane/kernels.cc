// CPU kernels of the lane's ops.

#include "ops/lane/kernels.h"

#include <algorithm>
#include <string>
#include <vector>

namespace gmeta {
namespace {

using lane::Lane;
using lane::Part;

class LaneOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, Listen(context, LaneRef<Lane>(new LaneResource<Lane>)));
  }
};

struct Alltoall {
  using L = Lane;
  static constexpr Kind kKind = Kind::kAlltoall;

  absl::Status Begin(OpKernelContext* context, Call call, Lane* lane) {
    TF_RETURN_IF_ERROR(division_.Read(context, call, *lane));
    const int64_t width = division_.width, ranks = lane->size();
    shape_ = context->input(1).shape();
    call.width = static_cast<uint64_t>(width);
    const char* data = static_cast<const char*>(context->input(1).data());
    if (width == 0) {
      stand_in_.resize(division_.rows);
      data = stand_in_.data();
    }
    const int64_t size = width == 0 ? 1 : width;
    std::vector<Part> parts;
    for (const int64_t rows : division_.splits) {
      parts.push_back({data, static_cast<size_t>(rows * size)});
      data += rows * size;
    }
    bytes = width * (division_.rows - division_.splits[lane->rank()]);
    Tensor* received_splits;
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({ranks}), &received_splits));
    const auto place = [=](const std::vector<uint64_t>& from) -> char* {
      int32_t* const counts = received_splits->flat<int32_t>().data();
      int64_t total = 0;
      for (int64_t r = 0; r < ranks; ++r) {
        counts[r] = static_cast<int32_t>(from[r] / size);
        total += counts[r];
        if (!division_.expects.empty() && division_.expects[r] != counts[r]) {
          allocated = absl::InvalidArgumentError(absl::StrCat(
              "alltoall '", call.name, "' on rank ", lane->rank(), ": rank ", r, " sent ",
              counts[r], " rows, but received_splits says ", division_.expects[r]));
          return nullptr;
        }
      }
      return Place(context, total);
    };
    lane->channel()->BeginAlltoallv(call, std::move(parts), place);
    return absl::OkStatus();
  }

  void End() {}

  int64_t bytes = 0;  // that this rank gives to others
  absl::Status allocated;

 private:
  char* Place(OpKernelContext* context, int64_t total) {
    shape_.set_dim(0, total);
    Tensor* received;
    allocated = context->allocate_output(0, shape_, &received);
    if (!allocated.ok()) return nullptr;
    if (division_.width > 0 && total > 0) return static_cast<char*>(received->data());
    stand_in_received_.resize(total + 1);
    return stand_in_received_.data();
  }

  Division division_;
  TensorShape shape_;
  // A row without elements is sent as a byte, so that its receiver can count it.
  std::vector<char> stand_in_, stand_in_received_;
};

template <class T>
struct Allreduce {
  using L = Lane;
  static constexpr Kind kKind = Kind::kAllreduce;

  absl::Status Begin(OpKernelContext* context, Call call, Lane* lane) {
    int64_t elements = 0;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const Tensor& term = context->input(i);
      elements += term.NumElements();
      sums_.push_back(nullptr);
      TF_RETURN_IF_ERROR(context->allocate_output(i - 1, term.shape(), &sums_.back()));
    }
    call.width = static_cast<uint64_t>(elements);
    bytes = elements * static_cast<int64_t>(sizeof(T));
    values_ = static_cast<T*>(sums_[0]->data());
    if (sums_.size() > 1) {
      const auto type = tensorflow::DataTypeToEnum<T>::value;
      TF_RETURN_IF_ERROR(context->allocate_temp(type, TensorShape({elements}), &joined_));
      values_ = static_cast<T*>(joined_.data());
    }
    T* to = values_;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const Tensor& term = context->input(i);
      const T* const from = static_cast<const T*>(term.data());
      to = std::copy(from, from + term.NumElements(), to);
    }
    lane->channel()->BeginAllreduce(call, values_, elements);
    return absl::OkStatus();
  }

  void End() {
    if (sums_.size() == 1) return;
    const T* from = values_;
    for (Tensor* sum : sums_) {
      std::copy(from, from + sum->NumElements(), static_cast<T*>(sum->data()));
      from += sum->NumElements();
    }
  }

  int64_t bytes = 0;  // of this rank's terms
  absl::Status allocated;

 private:
  std::vector<Tensor*> sums_;
  Tensor joined_;  // of several tensors, all elements
  T* values_ = nullptr;
};

#define GMETA_CPU(op) Name(op).Device(tensorflow::DEVICE_CPU)

REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLane"), LaneOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneConnect"), ConnectOp<Lane>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneCounts"), CountsOp<Lane>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAlltoall"), CollectiveOp<Alltoall>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<float>("T"),
                        CollectiveOp<Allreduce<float>>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<double>("T"),
                        CollectiveOp<Allreduce<double>>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<int32_t>("T"),
                        CollectiveOp<Allreduce<int32_t>>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<int64_t>("T"),
                        CollectiveOp<Allreduce<int64_t>>);

}  // namespace
}  // namespace gmeta
