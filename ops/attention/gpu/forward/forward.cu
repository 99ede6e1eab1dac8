// The C ABI of HSTU's attention on the GPU. The gradients have their own file (backward.cu), and so
// do the kernels with softmax (softmax_forward.cu), so that they compile side by side.

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/forward/launch_forward.cuh"

using namespace gmeta::hstu;
using gmeta::Guarded;

int gmeta_hstu_supported(int32_t dtype, int32_t width) {
  return Guarded([&] { CheckSupported(dtype, width); });
}

int64_t gmeta_hstu_plan_bytes(int64_t tokens, int32_t batch) {
  return static_cast<int64_t>(Plan::Bytes(tokens, batch));
}

int gmeta_hstu_plan(const int64_t* offsets, const int32_t* visible, int64_t tokens, int32_t batch,
                    void* plan, void* stream) {
  return Guarded([&] {
    gmeta::Require(tokens < INT32_MAX, "hstu attention: at most 2^31 - 2 tokens in a batch");
    MakePlan(offsets, visible, tokens, batch, Plan::In(plan, tokens, batch),
             static_cast<cudaStream_t>(stream));
  });
}

int gmeta_hstu_forward(const GmetaHstuAttention* attention, GmetaHeads out, void* stream) {
  return Guarded([&] {
    const auto on = static_cast<cudaStream_t>(stream);
    if (attention->softmax != nullptr) return ForwardSoftmax(*attention, out, on);
    Dispatch(*attention, [&](auto type, auto width, auto biased, auto scored) {
      Forward<ForwardPass<decltype(type), width(), biased(), scored()>>(*attention, out, on);
    });
  });
}
