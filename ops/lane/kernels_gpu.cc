// GPU kernels of the lane's ops. TensorFlow keeps handles, texts and sizes in host memory, and the
// tensors, int32 too, on the GPU.

#include "ops/common/kernels_gpu.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/lane/kernels.h"
#include "ops/lane/nccl_lane.h"

namespace gmeta {
namespace {

using lane::Nccl;
using lane::NcclLane;

// The process's NCCL.
struct Loaded {
  std::mutex mutex;
  bool is_there = false;
  Nccl nccl;
};

Loaded& TheNccl() {
  static Loaded* const loaded = new Loaded;
  return *loaded;
}

class FindOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    char gpu[64] = "";
    int32_t device = 0;
    int version = 0;
    OP_REQUIRES_OK(context, CudaStatus(gmeta_gpu_device(&device, gpu, sizeof gpu)));
    std::string id, why = Load(context->input(0).flat<tstring>());
    const Nccl& nccl = TheNccl().nccl;
    if (why.empty() && nccl.get_version(&version) != Nccl::kSuccess) why = "NCCL has no version";
    if (why.empty() && context->input(1).scalar<bool>()()) {
      Nccl::Id made;
      const int code = nccl.get_unique_id(&made);
      if (code == Nccl::kSuccess) id.assign(made.bytes, sizeof made.bytes);
      if (code != Nccl::kSuccess) why = nccl.get_error_string(code);
    }
    Tensor* number = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &number));
    number->scalar<int32_t>()() = version;
    const std::string texts[] = {gpu, "", id, why};
    for (const int output : {0, 2, 3}) {
      Tensor* text = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(output, TensorShape({}), &text));
      text->scalar<tstring>()() = texts[output];
    }
  }

 private:
  template <class Files>
  static std::string Load(const Files& files) {
    std::lock_guard<std::mutex> lock(TheNccl().mutex);
    std::string why;
    for (int64_t i = 0; i < files.size() && !TheNccl().is_there; ++i) {
      why = TheNccl().nccl.Load(files(i));
      TheNccl().is_there = why.empty();
    }
    return TheNccl().is_there ? "" : why.empty() ? "no file of NCCL is named" : why;
  }
};

class NcclLaneOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES(context, TheNccl().is_there, Failed("NCCL isn't loaded"));
    OP_REQUIRES_OK(context,
                   Listen(context, LaneRef<NcclLane>(new LaneResource<NcclLane>(TheNccl().nccl))));
  }
};

struct GpuAlltoall {
  using L = NcclLane;
  static constexpr Kind kKind = Kind::kAlltoall;

  absl::Status Begin(OpKernelContext* context, Call call, NcclLane* lane) {
    Division division;
    TF_RETURN_IF_ERROR(division.Read(context, call, *lane));
    if (division.expects.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "alltoall '", call.name, "' of GPUs needs to know how many rows come from each rank"));
    }
    const int64_t width = division.width;
    call.width = static_cast<uint64_t>(width);
    bytes = width * (division.rows - division.splits[lane->rank()]);
    Tensor *received, *received_splits;
    const auto ranks = static_cast<int64_t>(division.expects.size());
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({ranks}), &received_splits));
    std::vector<size_t> sends, receives;
    int64_t total = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      received_splits->flat<int32_t>()(r) = static_cast<int32_t>(division.expects[r]);
      total += division.expects[r];
      sends.push_back(static_cast<size_t>(division.splits[r] * width));
      receives.push_back(static_cast<size_t>(division.expects[r] * width));
    }
    TensorShape shape = context->input(1).shape();
    shape.set_dim(0, total);
    TF_RETURN_IF_ERROR(context->allocate_output(0, shape, &received));
    lane->BeginAlltoall(call, context->input(1).data(), std::move(sends), received->data(),
                        std::move(receives), CudaStream(context));
    return absl::OkStatus();
  }

  void End() {}

  int64_t bytes = 0;  // that this rank gives to others
  absl::Status allocated;
};

template <class T, Nccl::Type kType>
struct GpuAllreduce {
  using L = NcclLane;
  static constexpr Kind kKind = Kind::kAllreduce;

  absl::Status Begin(OpKernelContext* context, Call call, NcclLane* lane) {
    std::vector<NcclLane::Term> terms;
    size_t elements = 0;
    for (int i = 1; i < context->num_inputs(); ++i) {
      const Tensor& term = context->input(i);
      Tensor* sum;
      TF_RETURN_IF_ERROR(context->allocate_output(i - 1, term.shape(), &sum));
      terms.push_back({term.data(), sum->data(), static_cast<size_t>(term.NumElements())});
      elements += terms.back().elements;
    }
    call.width = elements;
    bytes = static_cast<int64_t>(elements * sizeof(T));
    lane->BeginAllreduce(call, std::move(terms), kType, CudaStream(context));
    return absl::OkStatus();
  }

  void End() {}

  int64_t bytes = 0;  // of this rank's terms
  absl::Status allocated;
};

#define GMETA_GPU(op) Name(op).Device(tensorflow::DEVICE_GPU)

REGISTER_KERNEL_BUILDER(GMETA_GPU("GmetaLaneFind")
                            .HostMemory("files")
                            .HostMemory("make_id")
                            .HostMemory("gpu")
                            .HostMemory("version")
                            .HostMemory("id")
                            .HostMemory("why"),
                        FindOp);
REGISTER_KERNEL_BUILDER(
    GMETA_GPU("GmetaLane").HostMemory("host").HostMemory("lane").HostMemory("port"), NcclLaneOp);
REGISTER_KERNEL_BUILDER(GMETA_GPU("GmetaLaneConnect")
                            .HostMemory("lane")
                            .HostMemory("rank")
                            .HostMemory("hosts")
                            .HostMemory("ports")
                            .HostMemory("key")
                            .HostMemory("start")
                            .HostMemory("patience")
                            .HostMemory("id"),
                        ConnectOp<NcclLane>);
REGISTER_KERNEL_BUILDER(GMETA_GPU("GmetaLaneCounts").HostMemory("lane").HostMemory("counts"),
                        CountsOp<NcclLane>);
REGISTER_KERNEL_BUILDER(GMETA_GPU("GmetaLaneAlltoall")
                            .HostMemory("lane")
                            .HostMemory("splits")
                            .HostMemory("expected")
                            .HostMemory("received_splits"),
                        CollectiveOp<GpuAlltoall>);

#define GMETA_GPU_SUM(T) GMETA_GPU("GmetaLaneAllreduce").HostMemory("lane").TypeConstraint<T>("T")

using SumOfFloats = CollectiveOp<GpuAllreduce<float, Nccl::kFloat>>;
using SumOfDoubles = CollectiveOp<GpuAllreduce<double, Nccl::kDouble>>;
using SumOfInt32 = CollectiveOp<GpuAllreduce<int32_t, Nccl::kInt32>>;
using SumOfInt64 = CollectiveOp<GpuAllreduce<int64_t, Nccl::kInt64>>;
REGISTER_KERNEL_BUILDER(GMETA_GPU_SUM(float), SumOfFloats);
REGISTER_KERNEL_BUILDER(GMETA_GPU_SUM(double), SumOfDoubles);
REGISTER_KERNEL_BUILDER(GMETA_GPU_SUM(int32_t), SumOfInt32);
REGISTER_KERNEL_BUILDER(GMETA_GPU_SUM(int64_t), SumOfInt64);

}  // namespace
}  // namespace gmeta
