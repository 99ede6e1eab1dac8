// The C ABI of what a bias needs besides attention itself: the table that finds buckets of times,
// and the partial sums of the gradients.

#include <cmath>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/bias_sums.cuh"
#include "ops/attention/gpu/launch.cuh"
#include "ops/common/gpu/cuda_launch.cuh"

namespace gmeta::hstu {
namespace {

constexpr int kBiasThreads = 128;  // threads per block

unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>((threads + kBiasThreads - 1) / kBiasThreads);
}

struct Starts {
  int64_t of[kMostBuckets];
  int size;
};

__global__ void MakeTimeTable(const __grid_constant__ Starts starts, TimeTable* table) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < kMostBuckets)
    table->starts[i] = i < starts.size ? static_cast<double>(starts.of[i]) : INFINITY;
  if (i < kTimeKeys) table->of_key[i] = BucketOfKey(i, starts.of, starts.size);
}

// One thread per number of the tables.
__global__ void SumParts(BiasParts parts, const PlanHeader* header, float scale, float* positions,
                         float* time_buckets) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int bucket = i - parts.places;
  if (bucket >= parts.buckets) return;
  double sum = 0.0;
  const auto add = [&](const float* from, int count, int64_t stride) {
    for (int part = 0; part < count; ++part) sum += from[part * stride];
  };
  const auto add_of_warps = [&](int at) {
    add(parts.of_warps + at, parts.blocks * BiasParts::kWarps, parts.OfWarp());
  };
  if (bucket < 0) {
    add(parts.slices + i, parts.Slices(), parts.places);
    if (i == 0) add_of_warps(0);
    if (i == parts.places - 1) add_of_warps(1);
  } else {
    add_of_warps(2 + bucket);
  }
  const float found = header->invalid ? NAN : static_cast<float>(scale * sum);
  (bucket < 0 ? positions[i] : time_buckets[bucket]) = found;
}

}  // namespace

BiasParts PartsOf(const GmetaHstuAttention& a) {
  const GpuBias bias = BiasOf(a);
  BiasParts parts{};
  parts.blocks = static_cast<int>(PersistentBlocks(Plan::MaxTiles(a.tokens, a.batch) * a.heads));
  if (bias.positions != nullptr) parts.places = 2 * bias.n - 1;
  if (bias.time_buckets != nullptr) parts.buckets = a.bias->buckets;
  return parts;
}

void SumBiasParts(const BiasParts& parts, const PlanHeader* header, float scale,
                  const GmetaHstuBiasGradient& to, cudaStream_t stream) {
  gmeta::Launch(SumParts, BlocksFor(parts.places + parts.buckets), kBiasThreads, 0, stream,
                "hstu attention, sums of the bias's gradients", parts, header, scale, to.positions,
                to.time_buckets);
}

}  // namespace gmeta::hstu

int64_t gmeta_hstu_time_table_bytes() { return sizeof(gmeta::hstu::TimeTable); }

int gmeta_hstu_time_table(const int64_t* starts, int32_t size, void* table, void* stream) {
  return gmeta::Guarded([&] {
    using namespace gmeta::hstu;
    gmeta::Require(
        size >= 0 && AreTimeBuckets(starts, static_cast<size_t>(size)),
        "hstu attention: a bias of times has at most 256 buckets, each at least 25% wider "
        "than the one before, got " +
            std::to_string(size + 1) + " or narrower ones");
    Starts all{};
    std::copy(starts, starts + size, all.of);
    all.size = size;
    gmeta::Launch(MakeTimeTable, BlocksFor(kTimeKeys), kBiasThreads, 0,
                  static_cast<cudaStream_t>(stream), "hstu attention, a table of times", all,
                  static_cast<TimeTable*>(table));
  });
}

int64_t gmeta_hstu_bias_workspace(const GmetaHstuAttention* attention) {
  int64_t bytes = 0;
  gmeta::Guarded([&] { bytes = gmeta::hstu::PartsOf(*attention).Bytes(); });
  return bytes;
}
