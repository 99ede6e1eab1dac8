// How rows of a GPU table change their form (device/forms.cuh): after a lookup, and when they have
// cooled down.

#include <algorithm>
#include <cstdint>

#include "ops/table/gpu/device/forms.cuh"
#include "ops/table/gpu/table.cuh"

namespace gmeta {
namespace {

// Rows that become half together, if some may be on disk.
constexpr uint32_t kColdOnDisk = 1 << 16;

}  // namespace

// If there is no memory for all listed rows, the list is kept, and the next lookup starts with it.
void GpuTable::PromoteListed(uint64_t most, cudaStream_t stream) {
  listed_ = most;
  BringRows(rare_no_more_.as<int64_t>(), static_cast<int64_t>(most),
            reinterpret_cast<const int32_t*>(&counters()->rare_no_more), stream);
  if (!full_.HasRoom(most)) {
    const GpuCounters now = ReadCounters(stream);
    NoteSize(now);
    most = now.rare_no_more;
    if (!full_.HasRoom(most)) MakeRoom(&full_, most, false, stream);
  }
  NoteGiven(stream);
  LaunchMoveMisfits(index(), mixed_rows(), rare_no_more_.as<int64_t>(), &counters()->rare_no_more,
                    static_cast<uint32_t>(most), true, static_cast<uint32_t>(step_), dim() % 4 == 0,
                    stream);
  CheckCuda(cudaMemsetAsync(&counters()->rare_no_more, 0, sizeof(uint32_t), stream),
            "clearing a counter");
  full_.MayHaveTaken(most);
  listed_ = 0;
}

void GpuTable::CoolDueShards(cudaStream_t stream) {
  if (!options_.half.cools()) return;
  uint64_t due = 0;
  for (size_t i = 0; i < policies_.shards(); ++i) {
    const SweepSchedule sweeps = options_.half.Sweeps(i, policies_.shards());
    if (sweeps.IsDue(static_cast<uint64_t>(step_))) due |= uint64_t{1} << i;
  }
  if (due == 0) return;
  InstallMoves(0, stream);
  // Usually the list has room for all cold rows; else it is made again, with more room.
  const auto step = static_cast<uint32_t>(step_);
  uint32_t cold = 0, room = 0;
  do {
    MakeRoomIn(&cold_, std::max<size_t>(cold, 4096) * sizeof(int64_t), stream);
    room = static_cast<uint32_t>(cold_.bytes() / sizeof(int64_t));
    CheckCuda(cudaMemsetAsync(&counters()->cold, 0, sizeof(uint32_t), stream),
              "clearing a counter");
    index_.ForEachPart([&](const KeySlot* slots, uint64_t count) {
      LaunchListCold(slots, count, mixed_rows(), due, step, cold_.as<int64_t>(), room, stream);
    });
    cold = ReadCounters(stream).cold;
  } while (cold > room);
  // Those on disk are first brought to memory, so not all at once.
  const uint32_t most = HasRowsOnDisk() ? kColdOnDisk : cold;
  for (uint32_t done = 0; done < cold; done += most) {
    const uint32_t some = std::min(most, cold - done);
    const int64_t* const keys = cold_.as<int64_t>() + done;
    BringRows(keys, some, nullptr, stream);
    EnsureRoom(0, some, stream);
    NoteGiven(stream);
    CheckCuda(
        cudaMemcpyAsync(&counters()->cold, &some, sizeof some, cudaMemcpyHostToDevice, stream),
        "writing a counter");
    LaunchMoveMisfits(index(), mixed_rows(), keys, &counters()->cold, some, false, step,
                      dim() % 4 == 0, stream);
    half_->MayHaveTaken(some);
  }
  EndEpochs(due, stream);  // numbers may have changed without the last step
}

}  // namespace gmeta
