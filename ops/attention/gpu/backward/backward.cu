// The C ABI of the gradients of HSTU's attention on the GPU.

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/backward/backward.cuh"
#include "ops/attention/gpu/backward/bias_gradient.cuh"
#include "ops/attention/gpu/launch.cuh"

namespace gmeta::hstu {
namespace {

template <class P>
void Launch(const BackwardArguments& in, int64_t tiles, cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardMemory<P>);
  static_assert(kBytes <= hopper::kMaxSharedBytes, "fewer slots");
  LaunchPersistent(BackwardKernel<P>, in, tiles * in.heads, kBackwardThreads, kBytes, stream,
                   "hstu attention, gradients");
}

// Launches the pass that sums the gradients of the bias's tables, and adds up its sums. in.own
// holds q and the gradient of the output.
template <class T, int kWidth, bool kScored, bool kTimesOnly = false>
void DifferentiateBias(const GmetaHstuAttention& a, BackwardArguments in, int64_t tiles,
                       const GmetaHstuBiasGradient& to, cudaStream_t stream) {
  constexpr const char* kWhat = "hstu attention, gradients of the bias";
  using Pass = BackwardPass<T, kWidth, true, false, true, false, true, kScored, kTimesOnly>;
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
    Launch<Pass>(in, tiles, stream);
  }
  SumBiasParts(in.parts, in.plan.header, a.scale, to, stream);
}

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

template <class T, int kWidth, bool kBiased, bool kScored>
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

  in.own[0] = k, in.own[1] = v, in.others[0] = q, in.others[1] = out;
  in.of_scores = of_k.data, in.of_scores_stride = of_k.stride;
  in.of_weights = of_v.data, in.of_weights_stride = of_v.stride;
  if constexpr (!kScored) {
    Launch<BackwardPass<T, kWidth, true, true, false, true, false, false>>(in, tiles, stream);
  } else if constexpr (kWidth <= 128) {
    Launch<BackwardPass<T, kWidth, kBiased, true, true, true>>(in, tiles, stream);
  } else {
    Launch<BackwardPass<T, kWidth, kBiased, true, true, false>>(in, tiles, stream);
    Launch<BackwardPass<T, kWidth, kBiased, true, false, true>>(in, tiles, stream);
  }

  in.own[0] = q, in.own[1] = out, in.others[0] = k, in.others[1] = v;
  in.of_scores = of_q.data, in.of_scores_stride = of_q.stride;
  if constexpr (kScored) {
    if (!kBiased || of_bias == nullptr) {
      Launch<BackwardPass<T, kWidth, kBiased, false, true, false>>(in, tiles, stream);
    }
  }
  if constexpr (kBiased) {
    if (of_bias == nullptr) return;
    if constexpr (kScored && kWidth == 256) {
      // Without the memory of diagonals there is room for a third slot.
      if (in.bias.positions == nullptr) {
        return DifferentiateBias<T, kWidth, kScored, true>(a, in, tiles, *of_bias, stream);
      }
    }
    DifferentiateBias<T, kWidth, kScored>(a, in, tiles, *of_bias, stream);
  }
}

}  // namespace
}  // namespace gmeta::hstu

int gmeta_hstu_backward(const GmetaHstuAttention* attention, GmetaHeads of_out, GmetaHeads of_q,
                        GmetaHeads of_k, GmetaHeads of_v, const GmetaHstuBiasGradient* of_bias,
                        void* stream) {
  return gmeta::Guarded([&] {
    if (attention->tokens == 0 && attention->bias != nullptr && of_bias != nullptr) {
      gmeta::hstu::ClearBias(*attention, *of_bias, static_cast<cudaStream_t>(stream));
    }
    gmeta::hstu::Dispatch(*attention, [&](auto type, auto width, auto biased, auto scored) {
      gmeta::hstu::Backward<decltype(type), width(), biased(), scored()>(
          *attention, of_out, of_q, of_k, of_v, of_bias, static_cast<cudaStream_t>(stream));
    });
  });
}
