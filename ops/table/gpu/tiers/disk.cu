// How a GPU table uses rows on disk (tiers/disk.cuh).

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/read_records.cuh"
#include "ops/table/gpu/table.cuh"

namespace gmeta {

bool GpuTable::HasRowsOnDisk() const {
  return (full_disk_ != nullptr && full_disk_->any()) ||
         (half_disk_ != nullptr && half_disk_->any());
}

void GpuTable::MakeRoom(GpuRowStore* store, uint64_t rows, bool host, cudaStream_t stream) {
  const bool is_full = store == &full_;
  StorePools* const pools = is_full ? &counters()->full : &counters()->half;
  GpuDiskTier* const disk = is_full ? full_disk_.get() : half_disk_.get();
  InstallMoves(0, stream);
  asked_ = false;  // growth starts the counts of pools again
  store->Grow(std::min(store->Wish(rows), store->most_in_memory()), pools, stream);
  if (disk != nullptr && !(host ? store->HasFarRoom(rows) : store->HasRoom(rows))) {
    disk->Spill(PlaceOf(*store, pools), index_, 2 * rows, stream);
    NoteSize(ReadCounters(stream));
  }
  // The rows of the latest batches stay in memory, even if there are more of them.
  while (!host && !store->HasRoom(rows)) store->Grow(store->capacity() + rows, pools, stream);
}

void GpuTable::BringRows(const int64_t* keys, int64_t n, const int32_t* count,
                         cudaStream_t stream) {
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves*, GpuDiskTier* disk) {
    if (disk == nullptr || !disk->any()) return;
    bool again = true;
    while (again) {
      again = false;
      const uint32_t found =
          disk->Find(PlaceOf(*store, pools), keys, static_cast<uint32_t>(n), count, stream);
      if (found == 0) return;
      if (!store->HasRoom(found)) NoteSize(ReadCounters(stream));
      if (!store->HasRoom(found)) {
        MakeRoom(store, found, false, stream);
        again = true;  // a row that was on its way out of GPU memory may have gone to disk
      }
      NoteGiven(stream);
      disk->Bring(PlaceOf(*store, pools), stream);
      store->MayHaveTaken(found);
      since_moved_ += found;
    }
  });
}

void GpuTable::EnsureRoomAndBring(uint64_t full, uint64_t half, const int64_t* keys, int64_t n,
                                  cudaStream_t stream) {
  EnsureRoom(full, half, stream);
  while (HasRowsOnDisk()) {
    BringRows(keys, n, nullptr, stream);
    if (HasRoom(full, half)) return;
    EnsureRoom(full, half, stream);  // which may send rows of this batch to disk
  }
}

void GpuTable::AskForRows(const int64_t* keys, int64_t n, cudaStream_t stream) {
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves*, GpuDiskTier* disk) {
    if (disk == nullptr || !disk->any()) return;
    disk->Ask(PlaceOf(*store, pools), keys, static_cast<uint32_t>(n), stream);
  });
}

void GpuTable::InstallAsked(size_t most, cudaStream_t stream) {
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves*, GpuDiskTier* disk) {
    uint32_t rows = 0;
    while (disk != nullptr && disk->IsToInstall(most, &rows)) {
      if (!store->HasRoom(rows)) NoteSize(ReadCounters(stream));
      if (!store->HasRoom(rows)) MakeRoom(store, rows, false, stream);
      NoteGiven(stream);
      disk->Install(PlaceOf(*store, pools), stream);
      store->MayHaveTaken(rows);
      since_moved_ += rows;
    }
  });
}

uint32_t GpuTable::MostStaged() const {
  uint32_t most = UINT32_MAX;
  for (const GpuDiskTier* disk : {full_disk_.get(), half_disk_.get()}) {
    if (disk != nullptr && disk->any()) most = std::min(most, disk->MostStaged());
  }
  return most;
}

void GpuTable::Stage(uint32_t* numbers, uint32_t n, cudaStream_t stream) {
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves*, GpuDiskTier* disk) {
    if (disk != nullptr && disk->any()) disk->Stage(PlaceOf(*store, pools), numbers, n, stream);
  });
}

void GpuTable::ReadFromDisk(const int64_t* keys, int64_t n, float* out, cudaStream_t stream) {
  const int64_t most = std::min<int64_t>(n, MostStaged());
  for (int64_t done = 0; done < n; done += most) {
    const auto some = static_cast<uint32_t>(std::min(most, n - done));
    auto* const numbers = static_cast<uint32_t*>(Scratch(some * sizeof(uint32_t), stream));
    WithRows([&](const auto& rows) {
      Launch(NumberOnDisk<std::decay_t<decltype(rows)>>, BlocksOf(some), kBlockThreads, 0, stream,
             "finding rows on disk", index(), rows, keys + done, some, numbers);
    });
    Stage(numbers, some, stream);
    WithRows([&](const auto& rows) {
      const PieceColumns columns{out + done * static_cast<int64_t>(dim()), nullptr, nullptr,
                                 nullptr};
      Launch(ReadRecords<std::decay_t<decltype(rows)>>, BlocksOf(uint64_t{some} * kWarp),
             kBlockThreads, 0, stream, "reading records", rows, numbers, some, columns);
    });
  }
}

}  // namespace gmeta
