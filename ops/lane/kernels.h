// Shared by the lane's kernels: a collective runs on the thread of its lane, which `L` is: Lane
// (lane.h) for tensors in host memory, NcclLane (nccl_lane.h) for those on a GPU.

#ifndef GMETA_OPS_LANE_KERNELS_H_
#define GMETA_OPS_LANE_KERNELS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/lane/lane.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace gmeta {

using lane::Call;
using lane::Kind;
using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::tstring;

// How long a collective of a cancelled step may still take: the other ranks may be in it.
constexpr std::chrono::seconds kGraceOfCancelled{5};

inline absl::Status Failed(const std::string& why) {
  return absl::UnavailableError(absl::StrCat("gmeta lane: ", why));
}

template <class L>
class LaneResource : public tensorflow::ResourceBase {
 public:
  template <class... Arguments>
  explicit LaneResource(Arguments&&... arguments) : lane(std::forward<Arguments>(arguments)...) {}

  std::string DebugString() const override { return "gmeta lane"; }

  L lane;
};

template <class L>
using LaneRef = tensorflow::core::RefCountPtr<LaneResource<L>>;

template <class L>
absl::Status FindLane(OpKernelContext* context, LaneRef<L>* lane) {
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), lane);
}

// Makes a lane listen, and outputs it.
template <class L>
absl::Status Listen(OpKernelContext* context, LaneRef<L> made) {
  lane::Address address{context->input(0).scalar<tstring>()(), 0};
  const std::string why = made->lane.Listen(&address);
  if (!why.empty()) return Failed(why);
  Tensor *handle, *port;
  TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({}), &handle));
  TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({}), &port));
  handle->scalar<tensorflow::ResourceHandle>()() =
      tensorflow::ResourceHandle::MakeRefCountingHandle(made.release(), context->device()->name());
  port->scalar<int32_t>()() = address.port;
  return absl::OkStatus();
}

template <class L>
class ConnectOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LaneRef<L> found;
    OP_REQUIRES_OK(context, FindLane(context, &found));
    const auto hosts = context->input(2).vec<tstring>();
    const auto ports = context->input(3).vec<int32_t>();
    std::vector<lane::Address> addresses;
    for (int i = 0; i < hosts.size(); ++i) addresses.push_back({hosts(i), ports(i)});
    const auto seconds = [&](int input) {
      return std::chrono::seconds(context->input(input).scalar<int32_t>()());
    };
    const auto text = [&](int input) -> std::string {
      return context->input(input).scalar<tstring>()();
    };
    const std::string why = found->lane.Connect(context->input(1).scalar<int32_t>()(), addresses,
                                                text(4), seconds(5), seconds(6), text(7));
    OP_REQUIRES(context, why.empty(), Failed(why));
  }
};

template <class L>
class CountsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    LaneRef<L> found;
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
    if constexpr (Exchange::kKind == Kind::kAlltoall) {
      OP_REQUIRES_OK(context, context->GetAttr("ranks", &call_.ranks));
    }
    call_.kind = Exchange::kKind;
    call_.type = tensorflow::DataTypeString(type);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    using L = typename Exchange::L;
    struct State {
      LaneRef<L> lane;
      Exchange exchange;
      absl::Status status;
      tensorflow::CancellationToken token = 0;
    };
    const auto state = std::make_shared<State>();
    OP_REQUIRES_OK_ASYNC(context, FindLane(context, &state->lane), done);
    L* const lane = &state->lane->lane;
    OP_REQUIRES_ASYNC(context, lane->is_open(), Failed("it isn't connected"), done);
    if (auto* const manager = context->cancellation_manager(); manager != nullptr) {
      const auto cancel = [lane] {
        lane->abort().Soon("the step was cancelled", kGraceOfCancelled);
      };
      state->token = manager->get_cancellation_token();
      if (!manager->RegisterCallback(state->token, cancel)) cancel();
    }
    lane::Counts* const counts =
        Exchange::kKind == Kind::kAlltoall ? &lane->alltoalls : &lane->allreduces;
    counts->begun += 1;
    const auto begin = [this, context, state, lane] {
      state->status = state->exchange.Begin(context, call_, lane);
    };
    const auto take = [state, lane, counts] {
      const std::string& why = lane->failure();
      if (state->status.ok() && !why.empty()) state->status = Failed(why);
      if (state->status.ok()) state->exchange.End();
      counts->End(state->status.ok(), state->exchange.bytes);
    };
    const auto after = [context, state, lane, done = std::move(done)] {
      if (auto* const manager = context->cancellation_manager(); manager != nullptr) {
        manager->DeregisterCallback(state->token);
        lane->abort().Withdraw();
      }
      OP_REQUIRES_OK_ASYNC(context, state->exchange.allocated, done);
      OP_REQUIRES_OK_ASYNC(context, state->status, done);
      done();
    };
    lane->Run({begin, [lane](bool may_sleep) { return lane->Advance(may_sleep); }, take, after});
  }

 private:
  Call call_;
};

// How the rows of an alltoall are divided.
struct Division {
  int64_t rows = 0;
  int64_t width = 0;             // bytes of a row
  std::vector<int64_t> splits;   // rows for each rank
  std::vector<int64_t> expects;  // rows from each rank; empty if that isn't known

  // Reads the inputs of GmetaLaneAlltoall.
  template <class L>
  absl::Status Read(OpKernelContext* context, const Call& call, const L& lane) {
    const Tensor& tensor = context->input(1);
    rows = tensor.dims() == 0 ? -1 : tensor.dim_size(0);
    width = tensorflow::DataTypeSize(tensor.dtype());
    for (int i = 1; i < tensor.dims(); ++i) width *= tensor.dim_size(i);
    int64_t sum = 0;
    const bool right = Numbers(context->input(2), lane.size(), &splits, &sum) && sum == rows;
    if (!right) {
      return absl::InvalidArgumentError(absl::StrCat(
          "alltoall '", call.name, "' on rank ", lane.rank(), ": ", rows, " rows don't split into ",
          context->input(2).SummarizeValue(16), " for ", lane.size(), " ranks"));
    }
    const Tensor& expected = context->input(3);
    if (expected.NumElements() > 0 && !Numbers(expected, lane.size(), &expects, &sum)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "alltoall '", call.name, "' on rank ", lane.rank(), ": received_splits are ",
          expected.SummarizeValue(16), ", not the numbers of rows from ", lane.size(), " ranks"));
    }
    for (int r = 0; r < lane.size(); ++r) {
      const bool has_rows = splits[r] > 0 || (!expects.empty() && expects[r] > 0);
      if (!call.Has(r) && (has_rows || r == lane.rank())) {
        return absl::InvalidArgumentError(
            absl::StrCat("alltoall '", call.name, "' on rank ", lane.rank(), ": rank ", r,
                         has_rows ? " has rows in it" : " calls it", ", but doesn't take part"));
      }
    }
    return absl::OkStatus();
  }

 private:
  // Whether a tensor has one number per rank, none of them negative.
  static bool Numbers(const Tensor& tensor, int ranks, std::vector<int64_t>* numbers,
                      int64_t* sum) {
    const auto values = tensor.flat<int32_t>();
    *sum = 0;
    for (int64_t i = 0; i < values.size(); ++i) {
      numbers->push_back(values(i));
      *sum += values(i);
      if (values(i) < 0) return false;
    }
    return values.size() == ranks;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_LANE_KERNELS_H_
