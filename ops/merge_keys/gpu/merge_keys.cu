#include <algorithm>
#include <cstdint>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/merge_keys/gpu/merge_keys_abi.h"
#include "ops/merge_keys/merge_keys.h"

namespace gmeta {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostFeatures = 64;  // of a launch, whose parameters have 4 KiB
constexpr int64_t kMostBlocks = 1024;  // of a feature

struct Features {
  gmeta_gpu_feature_ids of[kMostFeatures];
  int64_t starts[kMostFeatures];  // the place of each one's first id among all
  unsigned blocks;                // of each
};

// How numbers that are hashed become ids.
struct Fold {
  bool mix;
  int bits;

  __device__ int64_t operator()(int64_t number) const {
    return mix ? MixFold(number, bits) : XorFold(number, bits);
  }
};

__global__ void Merge(const Features features, const int id_bits, const Fold fold, int64_t* keys,
                      unsigned long long* bad) {
  const unsigned feature = blockIdx.x / features.blocks, block = blockIdx.x % features.blocks;
  const gmeta_gpu_feature_ids& own = features.of[feature];
  const int64_t start = features.starts[feature];
  const int64_t stride = static_cast<int64_t>(features.blocks) * kThreads;
  for (int64_t i = static_cast<int64_t>(block) * kThreads + threadIdx.x; i < own.n; i += stride) {
    const int64_t id = own.wide != 0 ? static_cast<const int64_t*>(own.ids)[i]
                                     : static_cast<const int32_t*>(own.ids)[i];
    if (own.hashed == 0 && static_cast<uint64_t>(id) >> id_bits != 0) {
      atomicMin(bad, static_cast<unsigned long long>(start + i));
    }
    keys[start + i] = own.prefix | (own.hashed != 0 ? fold(id) : id);
  }
}

}  // namespace
}  // namespace gmeta

int gmeta_gpu_merge_keys(const gmeta_gpu_feature_ids* features, int64_t count, int32_t id_bits,
                         int32_t mix, int32_t mix_bits, int64_t* keys, int64_t* bad, void* stream) {
  return gmeta::Guarded([&] {
    const auto on = static_cast<cudaStream_t>(stream);
    // As an unsigned number, -1 is above all places.
    gmeta::CheckCuda(cudaMemsetAsync(bad, 0xff, sizeof *bad, on), "clearing the first bad id");
    const gmeta::Fold fold{mix != 0, mix != 0 ? mix_bits : id_bits};
    int64_t start = 0;
    for (int64_t first = 0; first < count; first += gmeta::kMostFeatures) {
      const int64_t some = std::min(count - first, gmeta::kMostFeatures);
      gmeta::Features launch{};
      int64_t longest = 0;
      for (int64_t i = 0; i < some; ++i) {
        launch.of[i] = features[first + i];
        launch.starts[i] = start;
        start += launch.of[i].n;
        longest = std::max(longest, launch.of[i].n);
      }
      if (longest == 0) continue;
      launch.blocks = static_cast<unsigned>(
          std::min((longest + gmeta::kThreads - 1) / gmeta::kThreads, gmeta::kMostBlocks));
      const unsigned grid = launch.blocks * static_cast<unsigned>(some);
      gmeta::Launch(gmeta::Merge, grid, gmeta::kThreads, 0, on, "merging keys", launch,
                    static_cast<int>(id_bits), fold, keys,
                    reinterpret_cast<unsigned long long*>(bad));
    }
  });
}
