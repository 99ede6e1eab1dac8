// Copies records of one form from row to row.

#ifndef GMETA_OPS_TABLE_GPU_TIERS_COPY_RECORDS_CUH_
#define GMETA_OPS_TABLE_GPU_TIERS_COPY_RECORDS_CUH_

#include <cstdint>

#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

// Copies the records of a warp's `count` first lanes. A record takes long to come over the bus, so
// each lane loads many vectors, also of several records, before it stores them. The whole warp
// calls it.
template <class Vec>
__device__ inline void CopyRecords(const RowsView& rows, uint32_t from, uint32_t to,
                                   uint32_t count) {
  constexpr uint32_t kAhead = 8;
  using Address = unsigned long long;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t vectors = rows.stride * sizeof(uint32_t) / sizeof(Vec);
  const auto address = [&](uint32_t row) {
    return lane < count ? reinterpret_cast<Address>(rows.weights(row)) : Address{0};
  };
  const Address source = address(from), target = address(to);
  for (uint32_t base = 0; base < count * vectors; base += kAhead * kWarp) {
    Vec read[kAhead];
    Vec* places[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t at = base + i * kWarp + lane, record = at / vectors, c = at % vectors;
      const Address its_source = __shfl_sync(kFullWarp, source, record % kWarp);
      const Address its_target = __shfl_sync(kFullWarp, target, record % kWarp);
      places[i] = record < count ? reinterpret_cast<Vec*>(its_target) + c : nullptr;
      if (record < count) read[i] = __ldcg(reinterpret_cast<const Vec*>(its_source) + c);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (places[i] != nullptr) *places[i] = read[i];
    }
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TIERS_COPY_RECORDS_CUH_
