// The partial sums of the gradients of a bias: their sizes, and their totals.

#include <cmath>

#include "ops/attention/gpu/attention_abi.h"
#include "ops/attention/gpu/bias/table_parts.cuh"
#include "ops/attention/gpu/launch.cuh"
#include "ops/common/gpu/cuda_launch.cuh"

namespace gmeta::hstu {
namespace {

// Sums over parts: a block of threads has 32 numbers of the tables, next to each other in each
// part. Its kRows rows of threads share the parts, and the first one adds their sums.
constexpr int kNumbersAtOnce = 32, kRows = 16;

__global__ void SumParts(BiasParts parts, const PlanHeader* header, float scale, float* positions,
                         float* time_buckets) {
  __shared__ double sums[kRows][kNumbersAtOnce];
  const int number = static_cast<int>(threadIdx.x) % kNumbersAtOnce,
            row = static_cast<int>(threadIdx.x) / kNumbersAtOnce;
  const int i = static_cast<int>(blockIdx.x) * kNumbersAtOnce + number;
  const int bucket = i - parts.places;
  double sum = 0.0;
  const auto add = [&](const float* from, int count, int64_t stride) {
#pragma unroll 4
    for (int part = row; part < count; part += kRows) sum += from[part * stride];
  };
  const auto add_of_warps = [&](int at) {
    add(parts.of_warps + at, parts.blocks * BiasParts::kWarps, parts.OfWarp());
  };
  if (bucket < 0) {
    add(parts.slices + i, parts.Slices(), parts.places);
    if (i == 0) add_of_warps(0);
    if (i == parts.places - 1) add_of_warps(1);
  } else if (bucket < parts.buckets) {
    add_of_warps(2 + bucket);
  }
  sums[row][number] = sum;
  __syncthreads();
  if (row > 0 || bucket >= parts.buckets) return;
  for (int other = 1; other < kRows; ++other) sum += sums[other][number];
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
  const int blocks = (parts.places + parts.buckets + kNumbersAtOnce - 1) / kNumbersAtOnce;
  gmeta::Launch(SumParts, static_cast<unsigned>(blocks), kNumbersAtOnce * kRows, 0, stream,
                "hstu attention, sums of the bias's gradients", parts, header, scale, to.positions,
                to.time_buckets);
}

}  // namespace gmeta::hstu

int64_t gmeta_hstu_bias_workspace(const GmetaHstuAttention* attention) {
  int64_t bytes = 0;
  gmeta::Guarded([&] { bytes = gmeta::hstu::PartsOf(*attention).Bytes(); });
  return bytes;
}
