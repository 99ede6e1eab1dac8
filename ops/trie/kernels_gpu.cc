// The GPU kernels of GmetaTrieStep, GmetaTrieSample, GmetaTrieGumbelStep, GmetaTrieLogProbs and its
// gradient: they queue work on the device's stream, and wait for nothing. trie_abi.h describes how
// wrong input shows in results.

#include "ops/common/kernels_gpu.h"

#include <cstdint>

#include "ops/trie/gpu/trie_abi.h"
#include "ops/trie/kernels_noise.h"
#include "ops/trie/kernels_ops.h"

namespace gmeta {
namespace {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelContext;

GmetaTrieLevel OnGpu(const trie::Level& level) {
  return {level.starts, level.digits,   reinterpret_cast<const uint8_t*>(level.allowed),
          level.nodes,  level.children, level.wide_digits};
}

GmetaTrieNoise OnGpu(const BatchNoise& noise) {
  return {noise.seed, noise.step, noise.keys, noise.level};
}

struct Gpu {
  static absl::Status Step(OpKernelContext* context, const trie::Level& level, const Batch& batch,
                           int64_t k, const NextBatch& next) {
    const GmetaTrieLevel on_gpu = OnGpu(level);
    const trie::NextBeams to = next.Of(0);
    return CudaStatus(gmeta_gpu_trie_step(batch.logits, batch.scores, batch.nodes, batch.users,
                                          batch.beams, batch.codes, &on_gpu, k, to.scores, to.nodes,
                                          to.beams, CudaStream(context)));
  }

  static absl::Status Sample(OpKernelContext* context, const trie::Level& level, const Batch& batch,
                             const BatchNoise& noise, const NextBatch& next) {
    const GmetaTrieLevel on_gpu = OnGpu(level);
    const GmetaTrieNoise of_users = OnGpu(noise);
    const trie::NextBeams to = next.Of(0);
    return CudaStatus(gmeta_gpu_trie_sample(batch.logits, batch.scores, batch.nodes, batch.users,
                                            batch.beams, batch.codes, &on_gpu, &of_users, to.scores,
                                            to.nodes, to.beams, CudaStream(context)));
  }

  static absl::Status GumbelStep(OpKernelContext* context, const trie::Level& level,
                                 const Batch& batch, const float* ranks, const BatchNoise& noise,
                                 int64_t k, const NextBatch& next) {
    tensorflow::Tensor scratch;
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_FLOAT, context->input(0).shape(), &scratch));
    const GmetaTrieLevel on_gpu = OnGpu(level);
    const GmetaTrieNoise of_users = OnGpu(noise);
    const trie::NextBeams to = next.Of(0);
    return CudaStatus(gmeta_gpu_trie_gumbel_step(
        batch.logits, batch.scores, ranks, batch.nodes, batch.users, batch.beams, batch.codes,
        &on_gpu, &of_users, k, scratch.flat<float>().data(), to.scores, to.nodes, to.beams,
        to.ranks, CudaStream(context)));
  }

  static absl::Status LogProbs(OpKernelContext* context, const trie::Level& level,
                               const trie::Rows& rows, int64_t n, float* to) {
    const GmetaTrieLevel on_gpu = OnGpu(level);
    return CudaStatus(gmeta_gpu_trie_log_probs(rows.logits, rows.nodes, rows.children, n,
                                               static_cast<int64_t>(rows.codes), &on_gpu, to,
                                               CudaStream(context)));
  }

  static absl::Status Gradient(OpKernelContext* context, const float* of_log_probs,
                               const trie::Level& level, const trie::Rows& rows, int64_t n,
                               float* to) {
    const GmetaTrieLevel on_gpu = OnGpu(level);
    return CudaStatus(gmeta_gpu_trie_log_probs_gradient(
        of_log_probs, rows.logits, rows.nodes, rows.children, n, static_cast<int64_t>(rows.codes),
        &on_gpu, to, CudaStream(context)));
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieStep").Device(DEVICE_GPU), TrieStepOp<Gpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieSample").Device(DEVICE_GPU), TrieSampleOp<Gpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieGumbelStep").Device(DEVICE_GPU), TrieGumbelStepOp<Gpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieLogProbs").Device(DEVICE_GPU), TrieLogProbsOp<Gpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieLogProbsGradient").Device(DEVICE_GPU),
                        TrieLogProbsGradientOp<Gpu>);

}  // namespace
}  // namespace gmeta
