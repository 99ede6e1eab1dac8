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

class AbortOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LaneRef found;
    OP_REQUIRES_OK(context, FindLane(context, &found));
    const std::string why = context->input(1).scalar<tstring>()();
    if (found->lane.channel() != nullptr) found->lane.channel()->Abort(why);
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

// An op that is a collective: `Exchange` runs on the lane's thread.
class CollectiveOp : public AsyncOpKernel {
 public:
  explicit CollectiveOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
    OP_REQUIRES_OK(context, context->GetAttr("T", &type_));
    OP_REQUIRES(context, tensorflow::DataTypeCanUseMemcpy(type_),
                absl::InvalidArgumentError(
                    absl::StrCat("'", label_, "' can't be sent to other ranks: its type is ",
                                 tensorflow::DataTypeString(type_))));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    LaneRef found;
    OP_REQUIRES_OK_ASYNC(context, FindLane(context, &found), done);
    lane::Lane* const lane = &found->lane;
    OP_REQUIRES_ASYNC(context, lane->channel() != nullptr, Failed("it isn't connected"), done);
    // std::function copies what it holds, so the reference is shared.
    auto held = std::make_shared<LaneRef>(std::move(found));
    lane::Counts* const counts = CountsOf(lane);
    counts->begun += 1;
    lane->Run([this, context, held, counts, done = std::move(done)] {
      int64_t size = 0;
      const absl::Status status = Exchange(context, (*held)->lane.channel(), &size);
      counts->End(status.ok(), size);
      OP_REQUIRES_OK_ASYNC(context, status, done);
      done();
    });
  }

 protected:
  virtual lane::Counts* CountsOf(lane::Lane* lane) const = 0;
  // `size` is set to the bytes that count.
  virtual absl::Status Exchange(OpKernelContext* context, lane::Channel* channel,
                                int64_t* size) = 0;

  Call Describe(Kind kind, int64_t width) const {
    return {kind, static_cast<uint64_t>(width), tensorflow::DataTypeString(type_), label_};
  }

  std::string label_;
  tensorflow::DataType type_;
};

class AlltoallOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 protected:
  lane::Counts* CountsOf(lane::Lane* lane) const override { return &lane->alltoalls; }
  absl::Status Exchange(OpKernelContext* context, lane::Channel* channel, int64_t* size) override {
    const Tensor& rows = context->input(1);
    const auto splits = context->input(2).flat<int32_t>();
    const int64_t ranks = channel->size(), n = rows.dims() == 0 ? -1 : rows.dim_size(0);
    TensorShape shape = rows.shape();
    int64_t width = tensorflow::DataTypeSize(type_);
    for (int i = 1; i < shape.dims(); ++i) width *= shape.dim_size(i);
    // A row without elements is sent as a byte, so that its receiver can count it.
    std::vector<char> stand_in(width == 0 && n > 0 ? n : 0);
    const char* const data = width == 0 ? stand_in.data() : static_cast<const char*>(rows.data());
    const Call call = Describe(Kind::kAlltoall, width);
    const bool hollow = width == 0;
    if (hollow) width = 1;
    std::vector<Part> parts;
    int64_t sum = 0;
    bool right = splits.size() == ranks;
    for (int64_t r = 0; right && r < ranks; ++r) {
      right = splits(r) >= 0 && sum + splits(r) <= n;
      parts.push_back({data + sum * width, static_cast<size_t>(splits(r) * width)});
      sum += splits(r);
    }
    if (!right || sum != n) {
      return absl::InvalidArgumentError(absl::StrCat(
          "alltoall '", label_, "' on rank ", channel->rank(), ": ", n, " rows don't split into ",
          context->input(2).SummarizeValue(16), " for ", ranks, " ranks"));
    }
    *size = static_cast<int64_t>(call.width) * (n - splits(channel->rank()));
    Tensor* received_splits;
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({ranks}), &received_splits));
    absl::Status allocated;
    std::vector<char> stand_in_received;
    const auto allocate = [&](const std::vector<uint64_t>& bytes) -> char* {
      int64_t total = 0;
      for (int64_t r = 0; r < ranks; ++r) {
        const int64_t came = static_cast<int64_t>(bytes[r]) / width;
        received_splits->vec<int32_t>()(r) = static_cast<int32_t>(came);
        total += came;
      }
      shape.set_dim(0, total);
      Tensor* received;
      allocated = context->allocate_output(0, shape, &received);
      if (!allocated.ok()) return nullptr;
      if (!hollow && total > 0) return static_cast<char*>(received->data());
      stand_in_received.resize(total + 1);
      return stand_in_received.data();
    };
    const std::string why = channel->Alltoallv(call, parts, allocate);
    TF_RETURN_IF_ERROR(allocated);
    return why.empty() ? absl::OkStatus() : Failed(why);
  }
};

template <class T>
class AllreduceOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 protected:
  lane::Counts* CountsOf(lane::Lane* lane) const override { return &lane->allreduces; }
  absl::Status Exchange(OpKernelContext* context, lane::Channel* channel, int64_t* size) override {
    std::vector<Tensor*> sums;
    int64_t elements = 0;
    for (int i = 1; i < context->num_inputs(); ++i) {
      elements += context->input(i).NumElements();
      sums.push_back(nullptr);
      TF_RETURN_IF_ERROR(context->allocate_output(i - 1, context->input(i).shape(), &sums.back()));
    }
    *size = elements * static_cast<int64_t>(sizeof(T));
    Tensor joined;
    if (sums.size() > 1) {
      TF_RETURN_IF_ERROR(context->allocate_temp(type_, TensorShape({elements}), &joined));
    } else {
      joined = *sums[0];
    }
    T* const values = static_cast<T*>(joined.data());
    T* to = values;
    for (int i = 1; i < context->num_inputs(); ++i) to = Copy(context->input(i), to);
    const std::string why =
        channel->Allreduce(Describe(Kind::kAllreduce, elements), values, elements);
    if (!why.empty()) return Failed(why);
    const T* from = values;
    for (Tensor* sum : sums) {
      const int64_t n = sum->NumElements();
      if (sums.size() > 1) std::copy(from, from + n, static_cast<T*>(sum->data()));
      from += n;
    }
    return absl::OkStatus();
  }

 private:
  static T* Copy(const Tensor& from, T* to) {
    const T* const values = static_cast<const T*>(from.data());
    return std::copy(values, values + from.NumElements(), to);
  }
};

#define GMETA_CPU(op) Name(op).Device(tensorflow::DEVICE_CPU)

REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLane"), LaneOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneConnect"), ConnectOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAbort"), AbortOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneCounts"), CountsOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAlltoall"), AlltoallOp);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<float>("T"),
                        AllreduceOp<float>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<double>("T"),
                        AllreduceOp<double>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<int32_t>("T"),
                        AllreduceOp<int32_t>);
REGISTER_KERNEL_BUILDER(GMETA_CPU("GmetaLaneAllreduce").TypeConstraint<int64_t>("T"),
                        AllreduceOp<int64_t>);

}  // namespace
}  // namespace gmeta
