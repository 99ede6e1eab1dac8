// The gradients with softmax: their instances (backward.cuh, output_products.cuh).

#include "ops/attention/gpu/backward/launch_backward.cuh"

namespace gmeta::hstu {

void BackwardSoftmax(const GmetaHstuAttention& a, const GmetaHeads& of_out, const GmetaHeads& of_q,
                     const GmetaHeads& of_k, const GmetaHeads& of_v,
                     const GmetaHstuBiasGradient* of_bias, cudaStream_t stream) {
  DispatchSoftmax(a, [&](auto type, auto width, auto biased) {
    Backward<decltype(type), width(), biased(), /*kScored=*/true, Activation::kSoftmax>(
        a, of_out, of_q, of_k, of_v, of_bias, stream);
  });
}

}  // namespace gmeta::hstu
