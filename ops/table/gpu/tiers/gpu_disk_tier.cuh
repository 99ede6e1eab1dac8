// GpuDiskTier: the rows of one form of a GPU table that are on disk (tiers/disk.cuh).
//
// All calls are made in the table's turn. Most wait for the stream: the host reads and writes the
// records. Ask and Install don't: a thread reads them (disk/ahead_reader.h).

#ifndef GMETA_OPS_TABLE_GPU_TIERS_GPU_DISK_TIER_CUH_
#define GMETA_OPS_TABLE_GPU_TIERS_GPU_DISK_TIER_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/table/disk/ahead_reader.h"
#include "ops/table/disk/numbered_records.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/memory/device_memory.cuh"
#include "ops/table/gpu/memory/gpu_index.cuh"
#include "ops/table/gpu/memory/row_store.cuh"
#include "ops/table/gpu/tiers/found_row.h"
#include "ops/table/gpu/tiers/table_place.h"

namespace gmeta {

struct DiskView;

class GpuDiskTier {
 public:
  // `owner` is for messages. `form` and `form_mask` define the rows' form by their numbers. Rows
  // that one of the last `pins` batches has requested stay in memory.
  GpuDiskTier(const std::string& owner, const gmeta_gpu_allocator& allocator,
              const std::string& folder, GpuRowStore* store, uint32_t form, uint32_t form_mask,
              uint32_t pins);
  ~GpuDiskTier();
  GpuDiskTier(const GpuDiskTier&) = delete;
  GpuDiskTier& operator=(const GpuDiskTier&) = delete;

  // Whether rows may be on disk. If not, a call needs none of the functions below.
  bool any() const { return any_; }
  // Finds the rows on disk of a batch's keys, or of the first *count. Returns how many there are.
  uint32_t Find(const TablePlace& place, const int64_t* keys, uint32_t n, const int32_t* count,
                cudaStream_t stream);
  // Brings the rows that Find has found. The store has room for them.
  void Bring(const TablePlace& place, cudaStream_t stream);
  // Starts reading the rows on disk of a later batch's keys.
  void Ask(const TablePlace& place, const int64_t* keys, uint32_t n, cudaStream_t stream);
  // Whether the rows that were requested first are to be brought: because they have been read, or
  // because more than `most` requests are open, in which case it waits. Sets *rows to how many
  // there are.
  bool IsToInstall(size_t most, uint32_t* rows);
  // Brings them, unless they have changed. The store has room for them.
  void Install(const TablePlace& place, cudaStream_t stream);
  // Writes at least this many rows of host memory to disk, or all that may go there, and some more.
  // The store and its pools change.
  void Spill(TablePlace place, const GpuIndex& index, uint64_t rows, cudaStream_t stream);
  // Stages the rows on disk among n numbers, at most MostStaged(), and lists the staged numbers in
  // place of theirs.
  void Stage(const TablePlace& place, uint32_t* numbers, uint32_t n, cudaStream_t stream);
  uint32_t MostStaged() const { return staged_rows_; }
  void Clear();

  uint64_t file_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return records_.file_bytes();
  }
  size_t bytes() const {
    return counts_.bytes() + found_.memory.bytes() + leaving_.memory.bytes() +
           records_.memory_bytes();  // requests are small beside these
  }

 private:
  // Rows that kernels have found.
  struct Found {
    DeviceMemory memory;
    std::vector<FoundRow> rows;  // the same, as the host has read them
  };

  // Rows that are read ahead, into a staging area of their own.
  struct Asked;

  DiskView View(const TablePlace& place, const Found& found) const;
  std::unique_ptr<Asked> TakeAsked(uint32_t n, cudaStream_t stream);
  // Begins a list of at most n rows.
  void Begin(Found* found, uint32_t n, cudaStream_t stream);
  // Reads the list. Waits for the stream.
  void Read(Found* found, cudaStream_t stream);
  // Reads the records of n requested rows, from number `first` on, into the staging area.
  void ReadRecords(uint32_t first, uint32_t n);
  // Writes the records of the rows that are to leave.
  void WriteRecords(const std::vector<uint32_t>& numbers);
  // Chooses the rows that are to leave.
  void Choose(const TablePlace& place, const GpuIndex& index, uint64_t rows, cudaStream_t stream);
  // Takes numbers of the disk, after it has freed the records of those given back.
  std::vector<uint32_t> TakeNumbers(const TablePlace& place, uint32_t n, cudaStream_t stream);

  const std::string owner_;
  const gmeta_gpu_allocator allocator_;
  GpuRowStore* const store_;
  const uint32_t form_, form_mask_, pins_;
  mutable std::mutex mutex_;  // guards the records
  disk::NumberedRecords records_;
  bool any_ = false;
  uint32_t batch_ = 0;
  uint32_t staged_ = 0, staged_rows_ = 0;  // the staging area
  uint64_t settled_ = 0;  // numbers that were given back, and whose records were freed
  DeviceMemory counts_;
  Found found_, leaving_;
  std::deque<std::unique_ptr<Asked>> asked_;  // open requests
  std::vector<std::unique_ptr<Asked>> idle_;
  std::unique_ptr<disk::AheadReader> reader_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TIERS_GPU_DISK_TIER_CUH_
