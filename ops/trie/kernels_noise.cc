// The CPU kernels of GmetaTrieSample and GmetaTrieGumbelStep.

#include "ops/trie/kernels_noise.h"

#include <cstdint>

#include "ops/trie/host/beam_step.h"
#include "ops/trie/host/ranks.h"
#include "ops/trie/host/sample.h"
#include "ops/trie/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;

struct Cpu {
  static absl::Status Sample(OpKernelContext* context, const trie::Level& level, const Batch& batch,
                             const BatchNoise& noise, const NextBatch& next) {
    return ForUsers(
        context, "trie_sample", level, batch, [] { return trie::Siblings(); },
        [&](trie::Siblings* siblings, size_t user) {
          return trie::Sample(level, batch.Of(user), noise.Of(user), siblings, next.Of(user));
        });
  }

  static absl::Status GumbelStep(OpKernelContext* context, const trie::Level& level,
                                 const Batch& batch, const float* ranks, const BatchNoise& noise,
                                 int64_t k, const NextBatch& next) {
    return ForUsers(
        context, "trie_gumbel_step", level, batch,
        [&] { return trie::BeamStep(static_cast<size_t>(k)); },
        [&](trie::BeamStep* step, size_t user) {
          const float* const of_user = ranks + static_cast<int64_t>(user) * batch.beams;
          return step->Run(level, batch.Of(user), trie::ByGumbel(of_user, noise.Of(user)),
                           next.Of(user));
        });
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaTrieSample").Device(DEVICE_CPU), TrieSampleOp<Cpu>);
REGISTER_KERNEL_BUILDER(Name("GmetaTrieGumbelStep").Device(DEVICE_CPU), TrieGumbelStepOp<Cpu>);

}  // namespace
}  // namespace gmeta
