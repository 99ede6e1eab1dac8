// CPU kernels of the lane's ops. A collective runs on the lane's own thread.

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/lane/lane.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace gmeta {
namespace {

using lane::Call;
using lane::Kind;
using lane::Part;
using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

class LaneResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "gmeta lane"; }
  lane::Lane lane;
};
using LaneRef = tensorflow::core::RefCountPtr<LaneResource>;

absl::Status Failed(const std::string& why) {
  return absl::UnavailableError(absl::StrCat("gmeta lane: ", why));
}

absl::Status FindLane(OpKernelContext* context, LaneRef* lane) {
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), lane);
}

class LaneOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LaneRef made(new LaneResource);
    lane::Address address{context->input(0).scalar<tstring>()(), 0};
    const std::string why = made->lane.Listen(&address);
    OP_REQUIRES(context, why.empty(), Failed(why));
    Tensor *handle, *port;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &handle));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &port));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(made.release(),
                                                          context->device()->name());
    port->scalar<int32_t>()() = address.port;
  }
};

class ConnectOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LaneRef found;
    OP_REQUIRES_OK(context, FindLane(context, &found));
    const auto hosts = context->input(2).vec<tstring>();
    const auto ports = context->input(3).vec<int32_t>();
    std::vector<lane::Address> addresses;
    for (int i = 0; i < hosts.size(); ++i) addresses.push_back({hosts(i), ports(i)});
    const auto seconds = [&](int input) {
      return std::chrono::seconds(context->input(input).scalar<int32_t>()());
    };
    const std::string why =
        found->lane.Connect(context->input(1).scalar<int32_t>()(), addresses,
                            context->input(4).scalar<tstring>()(), seconds(5), seconds(6));
    OP_REQUIRES(context, why.empty(), Failed(why));
  }
};

class CountsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LaneRef found;
    OP_REQUIRES_OK(context, FindLane(context, &found));
    Tensor* counts;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({2, 4}), &counts));
    int64_t* to = counts->flat<int64_t>().data();
    for (const lane::Counts* one : {&found->lane.alltoalls, &found->lane.allreduces}) {
      const int64_t ended = one->ended;  // before `begun`, so that it isn't more
      *to++ = one->begun;
      *to++ = ended;
      *to++ = one->calls;
      *to++ = one->bytes;
    }
  }
};

// An op that is a collective; `Exchange` is one call of it.
template <class Exchange>
class CollectiveOp : public AsyncOpKernel {
 public:
  explicit CollectiveOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    tensorflow::DataType type;
    OP_REQUIRES_OK(context, context->GetAttr("label", &call_.name));
    OP_REQUIRES_OK(context, context->GetAttr("T", &type));
    OP_REQUIRES(context, tensorflow::DataTypeCanUseMemcpy(type),
                absl::InvalidArgumentError(
                    absl::StrCat("'", call_.name, "' can't be sent to other ranks: its type is ",
                                 tensorflow::DataTypeString(type))));
    call_.kind = Exchange::kKind;
    call_.type = tensorflow::DataTypeString(type);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    struct State {
      LaneRef lane;
      Exchange exchange;
      absl::Status status;
    };
    const auto state = std::make_shared<State>();
    OP_REQUIRES_OK_ASYNC(context, FindLane(context, &state->lane), done);
    lane::Lane* const lane = &state->lane->lane;
    lane::Channel* const channel = lane->channel();
    OP_REQUIRES_ASYNC(context, channel != nullptr, Failed("it isn't connected"), done);
    lane::Counts* const counts = Exchange::CountsOf(lane);
    counts->begun += 1;
    const auto begin = [this, context, state, channel] {
      state->status = state->exchange.Begin(context, call_, channel);
    };
    const auto take = [state, channel, counts] {
      const std::string& why = channel->failure();
      if (state->status.ok() && !why.empty()) state->status = Failed(why);
      if (state->status.ok()) state->exchange.End();
      counts->End(state->status.ok(), state->exchange.bytes);
    };
    const auto after = [context, state, done = std::move(done)] {
      OP_REQUIRES_OK_ASYNC(context, state->exchange.allocated, done);
      OP_REQUIRES_OK_ASYNC(context, state->status, done);
      done();
    };
    lane->Run({begin, take, after});
  }

 private:
  Call call_;
};

struct Alltoall {
  static constexpr Kind kKind = Kind::kAlltoall;
  static lane::Counts* CountsOf(lane::Lane* lane) { return &lane->alltoalls; }

  absl::Status Begin(OpKernelContext* context, Call call, lane::Channel* channel) {
    const Tensor& rows = context->input(1);
    const auto splits = context->input(2).flat<int32_t>();
    const int64_t ranks = channel->size(), n = rows.dims() == 0 ? -1 : rows.dim_size(0);
    shape_ = rows.shape();
    width_ = tensorflow::DataTypeSize(rows.dtype());
    for (int i = 1; i < shape_.dims(); ++i) width_ *= shape_.dim_size(i);
    call.width = static_cast<uint64_t>(width_);
    const char* data = static_cast<const char*>(rows.data());
    if (width_ == 0) {
      stand_in_.resize(n > 0 ? n : 0);
      data = stand_in_.data();
    }
    const int64_t size = width_ == 0 ? 1 : width_;
    std::vector<Part> parts;
    int64_t sum = 0;
    bool right = splits.size() == ranks;
    for (int64_t r = 0; right && r < ranks; ++r) {
      right = splits(r) >= 0 && sum + splits(r) <= n;
      parts.push_back({data + sum * size, static_cast<size_t>(splits(r) * size)});
      sum += splits(r);
    }
    if (!right || sum != n) {
      return absl::InvalidArgumentError(
          absl::StrCat("alltoall '", call.name, "' on rank ", channel->rank(), ": ", n,
                       " rows don't split into ", context->input(2).SummarizeValue(16), " for ",
                       ranks, " ranks"));
    }
    bytes = width_ * (n - splits(channel->rank()));
    Tensor* received_splits;
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({ranks}), &received_splits));
    channel->BeginAlltoallv(call, std::move(parts), [=](const std::vector<uint64_t>& from) {
      int32_t* const counts = received_splits->flat<int32_t>().data();
      int64_t total = 0;
      for (int64_t r = 0; r < ranks; ++r) {
        counts[r] = static_cast<int32_t>(from[r] / size);
        total += counts[r];
      }
      return Place(context, total);
    });
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
    if (width_ > 0 && total > 0) return static_cast<char*>(received->data());
    stand_in_received_.resize(total + 1);
    return stand_in_received_.data();
  }

  TensorShape shape_;
  int64_t width_ = 0;
  // A row without elements is sent as a byte, so that its receiver can count it.
  std::vector<char> stand_in_, stand_in_received_;
};

template <class T>
struct Allreduce {
  static constexpr Kind kKind = Kind::kAllreduce;
  static lane::Counts* CountsOf(lane::Lane* lane) { return &lane->allreduces; }

  absl::Status Begin(OpKernelContext* context, Call call, lane::Channel* channel) {
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
    channel->BeginAllreduce(call, values_, elements);
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
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneConnect"), ConnectOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneCounts"), CountsOp);
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
