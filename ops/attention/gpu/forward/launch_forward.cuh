// The launch of a forward pass (forward.cuh).

#ifndef GMETA_OPS_ATTENTION_GPU_FORWARD_LAUNCH_FORWARD_CUH_
#define GMETA_OPS_ATTENTION_GPU_FORWARD_LAUNCH_FORWARD_CUH_

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/forward/forward.cuh"
#include "ops/attention/gpu/launch.cuh"

namespace gmeta::hstu {

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
  if constexpr (P::kSoftmax) in.log_sums = a.softmax->log_sums;
  static_assert(sizeof(Memory) <= hopper::kMaxSharedBytes, "smaller blocks");
  LaunchPersistent(ForwardKernel<P>, in, Plan::MaxTiles(a.tokens, a.batch) * a.heads,
                   kForwardThreads, sizeof(Memory), stream, "hstu attention, forward");
}

// gmeta_hstu_forward of an attention with softmax (softmax_forward.cu).
void ForwardSoftmax(const GmetaHstuAttention& a, const GmetaHeads& out, cudaStream_t stream);

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_FORWARD_LAUNCH_FORWARD_CUH_
