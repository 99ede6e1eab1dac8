// The C ABI of the gradients of HSTU's attention on the GPU.

#include "ops/hstu_attention/gpu_backward.cuh"
#include "ops/hstu_attention/gpu_launch.cuh"
#include "ops/hstu_attention/hstu_attention_abi.h"

namespace gmeta::hstu {
namespace {

template <class P>
void Launch(const BackwardArguments& in, int64_t tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardMemory<P>);
  static_assert(kBytes <= hopper::kMaxSharedBytes, "fewer slots");
  LaunchPersistent(BackwardKernel<P>, in, tiles * in.heads, kBackwardThreads, kBytes, stream,
                   "hstu attention, gradients");
}

template <class T, int kWidth>
void Backward(const GmetaHstuAttention& a, const GmetaHeads& of_out, const GmetaHeads& of_q,
              const GmetaHeads& of_k, const GmetaHeads& of_v, cudaStream_t stream) {
  CUtensorMap q, k, v, out;
  Require(MapOf<T>(&q, a, a.q, kStripRows) && MapOf<T>(&k, a, a.k, kStripRows) &&
              MapOf<T>(&v, a, a.v, kStripRows) && MapOf<T>(&out, a, of_out, kStripRows),
          "hstu attention: q, k, v or the gradient of the output can't be described to the copy "
          "engine; they must be 16-byte aligned, with strides of a multiple of 8 numbers");
  const int64_t tiles = Plan::MaxTiles(a.tokens, a.batch);
  BackwardArguments in;
  in.plan = Plan::In(const_cast<void*>(a.plan), a.tokens, a.batch);
  in.visible = a.visible;
  in.tokens = a.tokens, in.heads = a.heads, in.alpha = a.alpha, in.scale = a.scale;

  in.own[0] = k, in.own[1] = v, in.others[0] = q, in.others[1] = out;
  in.of_scores = of_k.data, in.of_scores_stride = of_k.stride;
  in.of_weights = of_v.data, in.of_weights_stride = of_v.stride;
  if constexpr (kWidth <= 128) {
    Launch<BackwardPass<T, kWidth, true, true, true>>(in, tiles, stream);
  } else {
    Launch<BackwardPass<T, kWidth, true, true, false>>(in, tiles, stream);
    Launch<BackwardPass<T, kWidth, true, false, true>>(in, tiles, stream);
  }

  in.own[0] = q, in.own[1] = out, in.others[0] = k, in.others[1] = v;
  in.of_scores = of_q.data, in.of_scores_stride = of_q.stride;
  Launch<BackwardPass<T, kWidth, false, true, false>>(in, tiles, stream);
}

}  // namespace
}  // namespace gmeta::hstu

int gmeta_hstu_backward(const GmetaHstuAttention* attention, GmetaHeads of_out, GmetaHeads of_q,
                        GmetaHeads of_k, GmetaHeads of_v, void* stream) {
  return gmeta::Guarded([&] {
    gmeta::hstu::Dispatch(*attention, [&](auto type, auto width) {
      gmeta::hstu::Backward<decltype(type), decltype(width)::value>(
          *attention, of_out, of_q, of_k, of_v, static_cast<cudaStream_t>(stream));
    });
  });
}
