// How rows of a GPU table are found, selected and removed on request.

#include <cstdint>
#include <type_traits>
#include <vector>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/table.cuh"
#include "ops/table/gpu/upkeep/maintenance.cuh"

namespace gmeta {

void GpuTable::Contains(const int64_t* keys, int64_t n, uint8_t* found, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  if (n == 0) return;
  Launch(ContainsKeys, BlocksOf(n), kBlockThreads, 0, stream, "looking for keys", index(), keys,
         static_cast<uint32_t>(n), found);
}

void GpuTable::Remove(const int64_t* keys, int64_t n, int64_t* removed, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  if (removed != nullptr) *removed = 0;
  if (n == 0) return;
  InstallMoves(0, stream);
  const size_t size = static_cast<size_t>(n);
  const bool watched = policies_.has_journal();
  uint8_t* const erased = watched ? static_cast<uint8_t*>(Scratch(size, stream)) : nullptr;
  const uint64_t before = removed != nullptr ? ReadCounters(stream).removes : 0;
  WithRows([&](const auto& rows) {
    using Rows = std::decay_t<decltype(rows)>;
    Launch(EraseKeys<Rows>, BlocksOf(n), kBlockThreads, 0, stream, "removing keys", index(), rows,
           keys, static_cast<uint32_t>(n), erased, &counters()->removes);
  });
  EndEpochs(policies_.all_shards(), stream);
  if (removed != nullptr) *removed = static_cast<int64_t>(ReadCounters(stream).removes - before);
  if (!watched) return;
  std::vector<int64_t> batch(size);
  std::vector<uint8_t> gone(size);
  CheckCuda(
      cudaMemcpyAsync(batch.data(), keys, sizeof(int64_t) * size, cudaMemcpyDeviceToHost, stream),
      "reading keys");
  CheckCuda(cudaMemcpyAsync(gone.data(), erased, size, cudaMemcpyDeviceToHost, stream),
            "reading what was removed");
  CheckCuda(cudaStreamSynchronize(stream), "reading what was removed");
  for (size_t i = 0; i < size; ++i) {
    if (gone[i] != 0) policies_.Removed(batch[i]);
  }
}

void GpuTable::LaunchSelect(const Scan& scan, int64_t* keys, uint32_t* numbers, uint32_t* live,
                            uint32_t* found, cudaStream_t stream) {
  CheckCuda(cudaMemsetAsync(&counters()->selected, 0, sizeof counters()->selected, stream),
            "clearing a counter");
  WithRows([&](const auto& rows) {
    using Rows = std::decay_t<decltype(rows)>;
    index_.ForEachPart([&](const KeySlot* slots, uint64_t count) {
      Launch(SelectRows<Rows>, BlocksOf(count), kBlockThreads, 0, stream, "scanning a table", slots,
             count, rows, scan, keys, numbers, live, found);
    });
  });
}

}  // namespace gmeta
