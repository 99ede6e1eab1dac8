// The C ABI of HSTU's attention on the GPU. The gradients have their own file (backward.cu).

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/forward/forward.cuh"
#include "ops/attention/gpu/launch.cuh"

namespace gmeta::hstu {
namespace {

template <class P>
void Forward(const GmetaHstuAttention& a, const GmetaHeads& out, cudaStream_t stream) {
  using Memory = ForwardMemory<P>;
  using T = typename P::T;
  ForwardArguments in;
  Require((!P::kScored ||
           (MapOf<T>(&in.q, a, a.q, kTileRows) && MapOf<T>(&in.k, a, a.k, Memory::kColumns))) &&
              MapOf<T>(&in.v, a, a.v, Memory::kColumns),
          "hstu attention: q, k or v can't be described to the copy engine; they must be 16-byte "
          "aligned, with strides of a multiple of 8 numbers");
  in.plan = Plan::In(const_cast<void*>(a.plan), a.tokens, a.batch);
  in.visible = a.visible;
  in.out = out.data, in.out_stride = out.stride;
  in.tokens = a.tokens, in.heads = a.heads;
  in.alpha = AlphaOf(a), in.scale = a.scale, in.bias = BiasOf(a);
  static_assert(sizeof(Memory) <= hopper::kMaxSharedBytes, "smaller blocks");
  LaunchPersistent(ForwardKernel<P>, in, Plan::MaxTiles(a.tokens, a.batch) * a.heads,
                   kForwardThreads, sizeof(Memory), stream, "hstu attention, forward");
}

}  // namespace
}  // namespace gmeta::hstu

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
    Dispatch(*attention, [&](auto type, auto width, auto biased, auto scored) {
      Forward<ForwardPass<decltype(type), width(), biased(), scored()>>(
          *attention, out, static_cast<cudaStream_t>(stream));
    });
  });
}
