// The kernels that read records by their numbers.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_READ_RECORDS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_READ_RECORDS_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

inline constexpr uint32_t kNoNumber = UINT32_MAX;  // of no row

// A piece of records as packed columns. Null columns are left out.
struct PieceColumns {
  float* rows;
  float* slots;
  int64_t* frequency;
  int64_t* last_step;
};

// Reads records into columns, with one warp per record, but for those of kNoNumber.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    ReadRecords(Rows rows, const uint32_t* numbers, uint32_t n, PieceColumns to) {
  const uint64_t at = GlobalThread() / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  if (at >= n) return;
  const uint32_t row = numbers[at];
  if (row == kNoNumber) return;
  const auto record = rows.record(row);
  if (to.rows != nullptr) {
    for (uint32_t i = lane; i < rows.dim; i += kWarp) {
      to.rows[at * rows.dim + i] = record.Weights(record.template Load<float>(i));
    }
  }
  if (to.slots != nullptr) {
    for (uint32_t i = lane; i < rows.slot_floats; i += kWarp) {
      to.slots[at * rows.slot_floats + i] = record.Slots(record.template Load<float>(rows.dim + i));
    }
  }
  if (lane == 0) {
    const RowHeader header = *rows.header(row);
    if (to.frequency != nullptr) to.frequency[at] = header.frequency;
    if (to.last_step != nullptr) to.last_step[at] = header.last_step;
  }
}

// Sets numbers[i] to the number of the row of keys[i] if it is on disk, else to kNoNumber.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    NumberOnDisk(IndexView index, Rows rows, const int64_t* keys, uint32_t n, uint32_t* numbers) {
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const bool active = at < n;
  const uint32_t entry = FindEntries<false>(index, active ? keys[at] : 0, active);
  if (!active) return;
  numbers[at] = entry != kNoEntry && rows.IsOnDisk(entry - 1) ? entry - 1 : kNoNumber;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_READ_RECORDS_CUH_
