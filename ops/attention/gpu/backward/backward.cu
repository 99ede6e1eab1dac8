// The C ABI of the gradients of HSTU's attention on the GPU. Those with softmax are compiled in
// their own file (softmax_backward.cu).

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/backward/launch_backward.cuh"

namespace gmeta::hstu {
namespace {

// Clears the tables' gradients, for a batch without tokens.
void ClearBias(const GmetaHstuAttention& a, const GmetaHstuBiasGradient& to, cudaStream_t stream) {
  const auto clear = [&](const float* table, float* of_table, int64_t size) {
    if (table == nullptr) return;
    CheckCuda(cudaMemsetAsync(of_table, 0, sizeof(float) * static_cast<size_t>(size), stream),
              "hstu attention, gradients of the bias");
  };
  clear(a.bias->positions, to.positions, 2 * a.bias->n - 1);
  clear(a.bias->time_buckets, to.time_buckets, a.bias->buckets);
}

}  // namespace
}  // namespace gmeta::hstu

int gmeta_hstu_backward(const GmetaHstuAttention* attention, GmetaHeads of_out, GmetaHeads of_q,
                        GmetaHeads of_k, GmetaHeads of_v, const GmetaHstuBiasGradient* of_bias,
                        void* stream) {
  return gmeta::Guarded([&] {
    const auto on = static_cast<cudaStream_t>(stream);
    if (attention->tokens == 0 && attention->bias != nullptr && of_bias != nullptr) {
      gmeta::hstu::ClearBias(*attention, *of_bias, on);
    }
    if (attention->softmax != nullptr) {
      return gmeta::hstu::BackwardSoftmax(*attention, of_out, of_q, of_k, of_v, of_bias, on);
    }
    gmeta::hstu::Dispatch(*attention, [&](auto type, auto width, auto biased, auto scored) {
      gmeta::hstu::Backward<decltype(type), width(), biased(), scored()>(*attention, of_out, of_q,
                                                                         of_k, of_v, of_bias, on);
    });
  });
}
