// The launches of the gradients (backward.cuh): the passes, one after another.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_LAUNCH_BACKWARD_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_LAUNCH_BACKWARD_CUH_

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/backward/backward.cuh"
#include "ops/attention/gpu/backward/bias_gradient.cuh"
#include "ops/attention/gpu/launch.cuh"
#include "ops/attention/gpu/softmax/output_products.cuh"

namespace gmeta::hstu {

template <class P>
void LaunchBackward(const BackwardArguments& in, int64_t tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardMemory<P>);
  static_assert(kBytes <= hopper::kMaxSharedBytes, "fewer slots");
  LaunchPersistent(BackwardKernel<P>, in, tiles * in.heads, kBackwardThreads, kBytes, stream,
                   "hstu attention, gradients");
}

// Launches the pass that sums the gradients of the bias's tables, and adds up its sums. in.own
// holds q and the gradient of the output.
template <class T, int kWidth, bool kScored, Activation kActivation, bool kTimesOnly = false>
void DifferentiateBias(const GmetaHstuAttention& a, BackwardArguments in, int64_t tiles,
                       const GmetaHstuBiasGradient& to, cudaStream_t stream) {
  constexpr const char* kWhat = "hstu attention, gradients of the bias";
  using Pass =
      BackwardPass<T, kWidth, true, false, true, false, true, kScored, kTimesOnly, kActivation>;
  constexpr int kBytes = sizeof(BackwardMemory<Pass>);
  static_assert(kBytes <= hopper::kMaxSharedBytes, "fewer slots");
  in.parts = PartsOf(a);
  in.parts.PlaceIn(to.workspace);
  CheckCuda(cudaMemsetAsync(in.parts.slices, 0, static_cast<size_t>(in.parts.SliceBytes()), stream),
            kWhat);
  if constexpr (Pass::kAlone) {
    LaunchPersistent(BiasGradientKernel<Pass>, in, tiles * in.heads, kBackwardThreads, kBytes,
                     stream, kWhat);
  } else {
    LaunchBackward<Pass>(in, tiles, stream);
  }
  SumBiasParts(in.parts, in.plan.header, a.scale, to, stream);
}

// A pass by columns or by rows of attention that has scores.
template <class T, int kWidth, bool kBiased, Activation kActivation, bool kColumns, bool kOfScores,
          bool kOfWeights>
using ScoredPass =
    BackwardPass<T, kWidth, kBiased, kColumns, kOfScores, kOfWeights,
                 /*kOfBias=*/false, /*kScored=*/true, /*kTimesOnly=*/false, kActivation>;

template <class T, int kWidth, bool kBiased, bool kScored,
          Activation kActivation = Activation::kSilu>
void Backward(const GmetaHstuAttention& a, const GmetaHeads& of_out, const GmetaHeads& of_q,
              const GmetaHeads& of_k, const GmetaHeads& of_v, const GmetaHstuBiasGradient* of_bias,
              cudaStream_t stream) {
  CUtensorMap q, k, v, out;
  Require((!kScored || (MapOf<T>(&q, a, a.q, kStripRows) && MapOf<T>(&k, a, a.k, kStripRows))) &&
              MapOf<T>(&v, a, a.v, kStripRows) && MapOf<T>(&out, a, of_out, kStripRows),
          "hstu attention: q, k, v or the gradient of the output can't be described to the copy "
          "engine; they must be 16-byte aligned, with strides of a multiple of 8 numbers");
  const int64_t tiles = Plan::MaxTiles(a.tokens, a.batch);
  BackwardArguments in;
  in.plan = Plan::In(const_cast<void*>(a.plan), a.tokens, a.batch);
  in.visible = a.visible;
  in.tokens = a.tokens, in.heads = a.heads, in.alpha = AlphaOf(a), in.scale = a.scale;
  in.bias = BiasOf(a);
  if constexpr (kActivation == Activation::kSoftmax) {
    OutputProducts<T, kWidth>(a, of_out, stream);
    in.rows = {a.softmax->log_sums, a.softmax->products, a.tokens};
  }

  in.own[0] = k, in.own[1] = v, in.others[0] = q, in.others[1] = out;
  in.of_scores = of_k.data, in.of_scores_stride = of_k.stride;
  in.of_weights = of_v.data, in.of_weights_stride = of_v.stride;
  if constexpr (!kScored) {
    LaunchBackward<BackwardPass<T, kWidth, true, true, false, true, false, false>>(in, tiles,
                                                                                   stream);
  } else if constexpr (kWidth <= 128) {
    LaunchBackward<ScoredPass<T, kWidth, kBiased, kActivation, true, true, true>>(in, tiles,
                                                                                  stream);
  } else {
    LaunchBackward<ScoredPass<T, kWidth, kBiased, kActivation, true, true, false>>(in, tiles,
                                                                                   stream);
    LaunchBackward<ScoredPass<T, kWidth, kBiased, kActivation, true, false, true>>(in, tiles,
                                                                                   stream);
  }

  in.own[0] = q, in.own[1] = out, in.others[0] = k, in.others[1] = v;
  in.of_scores = of_q.data, in.of_scores_stride = of_q.stride;
  if constexpr (kScored) {
    if (!kBiased || of_bias == nullptr) {
      LaunchBackward<ScoredPass<T, kWidth, kBiased, kActivation, false, true, false>>(in, tiles,
                                                                                      stream);
    }
  }
  if constexpr (kBiased) {
    if (of_bias == nullptr) return;
    if constexpr (kScored && kWidth == 256) {
      // Without the memory of diagonals there is room for a third slot.
      if (in.bias.positions == nullptr) {
        return DifferentiateBias<T, kWidth, kScored, kActivation, true>(a, in, tiles, *of_bias,
                                                                        stream);
      }
    }
    DifferentiateBias<T, kWidth, kScored, kActivation>(a, in, tiles, *of_bias, stream);
  }
}

// gmeta_hstu_backward of an attention with softmax and tokens (softmax_backward.cu).
void BackwardSoftmax(const GmetaHstuAttention& a, const GmetaHeads& of_out, const GmetaHeads& of_q,
                     const GmetaHeads& of_k, const GmetaHeads& of_v,
                     const GmetaHstuBiasGradient* of_bias, cudaStream_t stream);

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_LAUNCH_BACKWARD_CUH_
