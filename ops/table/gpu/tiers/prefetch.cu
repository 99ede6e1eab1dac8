// How a GPU table of several tiers prefetches (tiers/flights.cuh).

#include <algorithm>
#include <cstdint>

#include "ops/table/gpu/table.cuh"

namespace gmeta {

TablePlace GpuTable::PlaceOf(const GpuRowStore& store, StorePools* pools) const {
  return {index(), store.View(dim(), slot_floats(), pools, counters()), pools, counters(),
          static_cast<uint32_t>(step_)};
}

void GpuTable::InstallMoves(size_t most, cudaStream_t stream) {
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves* moves, GpuDiskTier*) {
    if (moves == nullptr || !moves->any()) return;
    moves->Install(PlaceOf(*store, pools), most, stream);
  });
}

void GpuTable::NoteGiven(cudaStream_t stream) {
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves*, GpuDiskTier*) {
    if (!store->has_far_rows()) return;
    CheckCuda(cudaMemcpyAsync(&pools->near.ready, &pools->near.given, sizeof pools->near.ready,
                              cudaMemcpyDeviceToDevice, stream),
              "noting a pool's state");
  });
}

void GpuTable::Prefetch(const int64_t* keys, int64_t n, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  if (n == 0 || full_moves_ == nullptr) return;
  InstallArrived(stream);
  AskForRows(keys, n, stream);
  const auto count = static_cast<uint64_t>(n);
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves* moves, GpuDiskTier*) {
    if (!store->has_far_rows()) return;
    if (!store->HasFarRoom(count)) NoteSize(ReadCounters(stream));
    if (!store->HasFarRoom(count)) MakeRoom(store, count, true, stream);
    const auto most_free = static_cast<uint32_t>(store->near_capacity() / 4);
    moves->Send(PlaceOf(*store, pools), keys, static_cast<uint32_t>(n), most_free, stream);
    store->MayHaveTaken(count);
  });
  since_moved_ += count;
  AskForSize(count, stream);
}

}  // namespace gmeta
