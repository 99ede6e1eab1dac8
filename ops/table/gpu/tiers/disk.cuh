// The third tier of a GPU table's rows: records on disk. The kernels that find such rows, bring
// them to memory and leave others out of it.
//
// A row on disk has a number, a header in GPU memory and an entry in the index, as every row has.
// So it is judged, counted, evicted and removed as if it were in memory. Its record is in a log
// (disk/numbered_records.h), by its number. Kernels can't reach it there; in their place, a batch's
// call works in five parts (gpu_disk_tier.cuh):
//
//   ListOnDisk    the batch's rows on disk, each once; marks its rows in host memory, so that they
//                 stay there until the update of their batch
//   the host      reads the records into a staging area: rows of host memory whose numbers are in
//                 no pool
//   BringRows     gives each of them a number of GPU memory or of host memory, as a new row gets
//                 one, copies the record, and changes the entry, if it is still that of the row
//   CountAges, ListOldest    when there is no room: the least recently used rows of host memory, in
//                 powers of two of steps. The host writes their records
//   LeaveMemory   gives them numbers of the disk
//
// A prefetch lists its batch's rows, and a thread reads their records while other batches compute.
// BringRows runs in a later turn, so no batch waits.
//
// Passes that read records and change none (evaluation, saves, eviction by norm) take the staged
// copy in place of the row: RenumberStaged puts its number into their list.

#ifndef GMETA_OPS_TABLE_GPU_TIERS_DISK_CUH_
#define GMETA_OPS_TABLE_GPU_TIERS_DISK_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/read_records.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/tiers/copy_records.cuh"
#include "ops/table/gpu/tiers/found_row.h"

namespace gmeta {

inline constexpr uint32_t kAges = 33;

struct DiskCounts {
  uint32_t found;
  uint32_t ages[kAges];  // rows that may go, by their age
};

// The rows of one form, for the kernels below.
struct DiskView {
  IndexView index;
  RowsView rows;
  uint32_t form, form_mask;  // a row is of this form if its number has these bits of the mask
  uint32_t batch;            // number of this batch
  uint32_t pinned_from;      // rows of host memory that this batch or a later one asked for stay
  uint32_t step;             // of the table
  uint32_t staged;           // number of the first row of the staging area
  DiskCounts* counts;
  FoundRow* found;
  uint32_t most;  // rows there is room for

  __device__ bool Has(uint32_t row) const { return (row & form_mask) == form; }

  // Lists the rows of a warp's `wanted` lanes; those beyond `most` only count. The whole warp calls
  // it.
  __device__ void List(bool wanted, int64_t key, uint32_t row, uint32_t at) const {
    const uint32_t lane = threadIdx.x % kWarp, mask = __ballot_sync(kFullWarp, wanted);
    if (mask == 0) return;
    uint32_t place = 0;
    if (lane == 0) place = atomicAdd(&counts->found, static_cast<uint32_t>(__popc(mask)));
    place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
    if (wanted && place < most) found[place] = {key, row, at};
  }

  // Whether a slot's row may leave host memory. Sets its age: 0, or 1 + log2 of the steps since it
  // was used.
  __device__ bool MayLeave(const KeySlot& slot, uint32_t* age) const {
    if (slot.entry == kNoEntry || !Has(slot.entry - 1)) return false;
    const uint32_t row = (slot.entry - 1) & ~form_mask;
    if (rows.IsNear(row) || rows.IsOnDisk(row) || rows.marks[row] >= pinned_from) return false;
    const uint32_t last = rows.header(row)->last_step;
    *age = last >= step ? 0 : kWarp - __clz(static_cast<int>(step - last));
    return true;
  }
};

// `count` is null, or there are only *count keys.
__global__ void __launch_bounds__(kBlockThreads)
    ListOnDisk(const DiskView disk, const int64_t* keys, uint32_t n, const int32_t* count) {
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const bool active = at < n && (count == nullptr || at < static_cast<uint32_t>(*count));
  const int64_t key = active ? keys[at] : 0;
  const uint32_t entry = FindEntries<false>(disk.index, key, active);
  const uint32_t row = (entry - 1) & ~disk.form_mask;
  bool wanted = false;
  if (entry != kNoEntry && disk.Has(entry - 1) && !disk.rows.IsNear(row)) {
    uint32_t* const mark = disk.rows.marks + row;
    if (disk.rows.IsOnDisk(row)) {
      wanted = atomicExch(mark, disk.batch) != disk.batch;
    } else if (*mark != kMoving) {
      *mark = disk.batch;
    }
  }
  disk.List(wanted, key, row, 0);
}

// Copies the headers of found rows to the staging area, and lists the staged numbers in place of
// theirs.
__global__ void __launch_bounds__(kBlockThreads)
    RenumberStaged(const DiskView disk, uint32_t n, uint32_t* numbers) {
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  if (at >= n) return;
  const FoundRow found = disk.found[at];
  *disk.rows.header(disk.staged + at) = *disk.rows.header(found.row);
  numbers[found.at] = (disk.staged + at) | disk.form;
}

// Lists those of n numbers that are of rows on disk.
__global__ void __launch_bounds__(kBlockThreads)
    FindNumbersOnDisk(const DiskView disk, const uint32_t* numbers, uint32_t n) {
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const uint32_t number = at < n ? numbers[at] : kNoNumber;
  const uint32_t row = number & ~disk.form_mask;
  const bool wanted = number != kNoNumber && disk.Has(number) && disk.rows.IsOnDisk(row);
  disk.List(wanted, 0, row, at);
}

// Brings n of the found rows, from number `first` on, whose records have been staged.
template <class Vec>
__global__ void __launch_bounds__(kBlockThreads)
    BringRows(const DiskView disk, uint32_t first, uint32_t n, GpuCounters* counters) {
  const RowsView& rows = disk.rows;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  FoundRow found{0, kNoNumber, 0};
  if (at < n) found = disk.found[first + at];
  KeySlot* slot = nullptr;
  uint32_t entry = kNoEntry;
  if (found.row != kNoNumber) slot = disk.index.SlotOf(found.key, &entry);
  const bool active = slot != nullptr && entry == (found.row | disk.form) + 1;
  const uint32_t mask = __ballot_sync(kFullWarp, active);
  if (mask == 0) return;
  const uint32_t staged = disk.staged + at, taken = rows.Take(mask, active);
  const uint32_t to = active ? taken : staged;  // where the copy changes nothing
  if (active) {
    *rows.header(to) = *rows.header(found.row);
    rows.marks[to] = rows.IsNear(to) ? kUsed : disk.batch;
    rows.marks[found.row] = 0;
    slot->entry = (to | disk.form) + 1;
  }
  rows.Give(active, found.row);
  CopyRecords<Vec>(rows, staged, to, min(kWarp, n - (at - lane)));
  if (lane == 0) atomicAdd(&counters->brought, static_cast<unsigned long long>(__popc(mask)));
}

__global__ void __launch_bounds__(kBlockThreads)
    CountAges(const DiskView disk, const KeySlot* slots, uint64_t count) {
  __shared__ uint32_t ages[kAges];
  if (threadIdx.x < kAges) ages[threadIdx.x] = 0;
  __syncthreads();
  const uint64_t at = GlobalThread();
  uint32_t age = 0;
  if (at < count && disk.MayLeave(ReadSlot(slots + at), &age)) atomicAdd(ages + age, 1u);
  __syncthreads();
  if (threadIdx.x < kAges && ages[threadIdx.x] != 0) {
    atomicAdd(disk.counts->ages + threadIdx.x, ages[threadIdx.x]);
  }
}

// Lists the rows that may leave and are of some age or older.
__global__ void __launch_bounds__(kBlockThreads)
    ListOldest(const DiskView disk, const KeySlot* slots, uint64_t count, uint32_t oldest) {
  const uint64_t at = GlobalThread();
  uint32_t age = 0;
  KeySlot slot{};
  if (at < count) slot = ReadSlot(slots + at);
  const bool leaves = at < count && disk.MayLeave(slot, &age) && age >= oldest;
  disk.List(leaves, slot.key, (slot.entry - 1) & ~disk.form_mask, 0);
}

// Gives the first n found rows, whose records have been written, the numbers `to`.
__global__ void __launch_bounds__(kBlockThreads)
    LeaveMemory(const DiskView disk, const uint32_t* to, uint32_t n, GpuCounters* counters) {
  const RowsView& rows = disk.rows;
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  FoundRow found{};
  if (at < n) {
    found = disk.found[at];
    *rows.header(to[at]) = *rows.header(found.row);
    rows.marks[to[at]] = rows.marks[found.row] = 0;
    disk.index.SlotOf(found.key)->entry = (to[at] | disk.form) + 1;
  }
  rows.Give(at < n, found.row);
  if (at == 0) counters->spilled += n;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TIERS_DISK_CUH_
