// The records of a GPU table by row number: memory that never moves, a directory, and a pool of
// free row numbers.
//
// Layout
//   Rows are in blocks of 2^k, and a directory says where each block is:
//
//     block: 2^k x [weights, slots, padding]   and   2^k x [frequency, last step]
//
//   The record is that of row_record.h, full or half, but its 8-byte header is stored separately.
//   So weights begin on a 16-byte boundary (a 32-byte one, the unit of memory access, if the widths
//   allow it): a row of 64 floats is 8 sectors and not 9, and each lane reads 16 bytes of it. And
//   passes that judge rows by their metadata (incremental saves, eviction) read 8 bytes per row,
//   densely. A lookup that inserts touches one sector more than if the header were stored with the
//   weights. Headers of neighbouring rows are 1/32 of a block apart: the most used rows are made
//   first, one after another, and atomic additions to the same cache line run one at a time.
//
//   A block is about 4 MB, so the directory of 100 M rows is some 50 KB and stays in the first
//   cache. Blocks are cut from chunks, which are larger allocations. The first `near_rows` rows are
//   in GPU memory. The records of the others, if a table may have any, are in pinned host memory,
//   which kernels read and write over the bus like GPU memory (tiers/flights.cuh). Their headers
//   are in GPU memory, so that passes that judge rows, and moves, don't wait for the bus. Of rows
//   on disk (tiers/disk.cuh), only headers are in memory: in the directory, their blocks share one
//   address of records, `nowhere`, where there are none.
//
// Free rows are in pools (pool.cuh).

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_ROWS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_ROWS_CUH_

#include <cstdint>

#include "ops/table/core/row_record.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/pool.cuh"

namespace gmeta {

// The record of a full row, given by the address of its weights. A vector has one float or four,
// and vectors are numbered through the weights and then the slots. Weights or Slots converts a
// loaded vector to numbers. Conversion is separate from loading, so that many loads may be in
// progress before it (mixed_rows.cuh, where records have two forms).
class FullRecord {
 public:
  FullRecord() = default;
  __device__ explicit FullRecord(float* weights) : weights_(weights) {}

  __device__ explicit operator bool() const { return weights_ != nullptr; }
  // Returns the record of another lane. The whole warp calls it.
  __device__ FullRecord OfLane(uint32_t lane) const {
    return FullRecord(reinterpret_cast<float*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(weights_), lane)));
  }

  // Loads vector c after `skipped` others.
  template <class Vec>
  __device__ Vec Load(uint32_t c, uint32_t skipped = 0) const {
    return __ldcg(reinterpret_cast<const Vec*>(weights_) + skipped + c);
  }
  template <class Vec>
  __device__ Vec Weights(Vec loaded) const {
    return loaded;
  }
  template <class Vec>
  __device__ Vec Slots(Vec loaded) const {
    return loaded;
  }
  template <class Vec>
  __device__ void StoreWeights(uint32_t c, Vec vector) const {
    reinterpret_cast<Vec*>(weights_)[c] = vector;
  }
  template <class Vec>
  __device__ void StoreSlots(uint32_t c, Vec vector) const {
    reinterpret_cast<Vec*>(weights_)[c] = vector;
  }
  // Calls change(number), which changes a slot, and returns its result.
  template <class Change, class Rounds>
  __device__ auto ChangeSlot(uint32_t at, const Change& change, const Rounds& /*rounds*/) const {
    return change(weights_ + at);
  }

 private:
  float* weights_ = nullptr;
};

// Values of a row's mark (tiers/flights.cuh): it is on its way to another tier, and it was used.
inline constexpr uint32_t kMoving = 0xffffffffu;
inline constexpr uint32_t kUsed = 0x80000000u;

// Where a block's records and headers are.
struct alignas(16) BlockPlace {
  char* records;
  RowHeader* headers;
};

// The rows of one form, as kernels see them.
struct RowsView {
  using Record = FullRecord;
  static constexpr bool kMixed = false;

  const BlockPlace* blocks;
  uint32_t log2_block_rows;
  uint32_t stride;  // four-byte words from one row to the next
  uint32_t dim;
  uint32_t slot_floats;
  PoolView near, far, disk;
  uint32_t near_rows;  // rows with smaller numbers are in GPU memory
  uint32_t numbers;    // of rows, whether they are used or not
  uint32_t* marks;     // one for each row, in tables with far rows (tiers/flights.cuh)
  char* nowhere;       // null if no row is on disk
  GpuCounters* counters;

  __device__ float* weights(uint32_t row) const {
    return reinterpret_cast<float*>(block(row).records) +
           static_cast<size_t>(in_block(row)) * stride;
  }
  __device__ FullRecord record(uint32_t row) const { return FullRecord(weights(row)); }
  __device__ RowHeader* header(uint32_t row) const {
    const uint32_t at = in_block(row);
    return block(row).headers + ((at % 32 << (log2_block_rows - 5)) | at / 32);
  }

  // Rounds weights as storing them in a new row does.
  template <class Vec>
  __device__ static Vec Rounded(Vec weights) {
    return weights;
  }

  // Rows of a table of one precision are full.
  __device__ bool IsToBeHalf(int64_t /*key*/, RowHeader /*header*/, uint32_t /*step*/) const {
    return false;
  }

  // Takes a free row for each lane of a nonempty mask and returns its number. `takes` is whether
  // this lane is in the mask. The whole warp calls it.
  __device__ uint32_t Take(uint32_t mask, bool takes) const {
    const uint32_t lane = threadIdx.x % kWarp, count = __popc(mask);
    unsigned long long place = 0;
    int below = 0;
    if (lane == 0) {
      if (far.capacity == 0) {
        place = near.Take(count);
      } else if (!near.TryTake(count, &place)) {
        place = far.Take(count);
        below = 1;
      }
    }
    below = __shfl_sync(kFullWarp, below, 0);
    place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
    if (!takes) return 0;
    return below != 0 ? far.At(place) : near.At(place);
  }
  __device__ uint32_t Take(uint32_t mask, bool takes, int64_t /*key*/, bool /*half_form*/) const {
    return Take(mask, takes);
  }
  __device__ bool IsNear(uint32_t row) const { return row < near_rows; }
  __device__ bool IsOnDisk(uint32_t row) const {
    return nowhere != nullptr && block(row).records == nowhere;
  }
  // Frees the rows of a warp's `gives` lanes. The whole warp calls it.
  __device__ void Give(bool gives, uint32_t row) const {
    near.Give(gives && IsNear(row), row);
    if (marks == nullptr) return;
    const bool on_disk = gives && IsOnDisk(row);
    far.Give(gives && !IsNear(row) && !on_disk, row);
    disk.Give(on_disk, row);
  }
  __device__ void Give(bool gives, int64_t /*key*/, uint32_t row) const { Give(gives, row); }

 private:
  __device__ BlockPlace block(uint32_t row) const {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(blocks + (row >> log2_block_rows)));
    return {reinterpret_cast<char*>(uint64_t{words.y} << 32 | words.x),
            reinterpret_cast<RowHeader*>(uint64_t{words.w} << 32 | words.z)};
  }
  __device__ uint32_t in_block(uint32_t row) const { return row & ((1u << log2_block_rows) - 1); }
};

// Records uses of a row that other threads may use as well. It has two steps, so that the thread
// can do other work while the first one's memory access is in progress.
class SharedTouch {
 public:
  // If `moves` is false, the last step stays.
  __device__ void Begin(RowHeader* header, uint32_t step, uint32_t uses, bool moves) {
    header_ = header;
    uses_ = uses;
    if (moves) header->last_step = step;
    before_ = atomicAdd(&header->frequency, uses);
  }
  // Keeps the frequency at its maximum if the addition has overflowed. Between the overflow and
  // this write, others may add to a value that is too small; this write comes after them.
  __device__ void End() const {
    if (header_ != nullptr && before_ > UINT32_MAX - uses_) {
      atomicExch(&header_->frequency, UINT32_MAX);
    }
  }
  // The frequency before the addition, and the number of uses added; 0 if no row was touched.
  __device__ uint32_t before() const { return before_; }
  __device__ uint32_t uses() const { return uses_; }

 private:
  RowHeader* header_ = nullptr;
  uint32_t uses_ = 0;
  uint32_t before_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_ROWS_CUH_
