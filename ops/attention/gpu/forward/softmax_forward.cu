// The forward pass with softmax: its instances (forward.cuh, row_softmax.cuh).

#include "ops/attention/gpu/forward/launch_forward.cuh"

namespace gmeta::hstu {

void ForwardSoftmax(const GmetaHstuAttention& a, const GmetaHeads& out, cudaStream_t stream) {
  DispatchSoftmax(a, [&](auto type, auto width, auto biased) {
    using Pass =
        ForwardPass<decltype(type), width(), biased(), /*kScored=*/true, Activation::kSoftmax>;
    Forward<Pass>(a, out, stream);
  });
}

}  // namespace gmeta::hstu
