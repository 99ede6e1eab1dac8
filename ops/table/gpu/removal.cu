// How rows of a GPU table are found, judged and removed: on request, and by policies (policies.h).

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/maintenance.cuh"
#include "ops/table/gpu/table.cuh"
#include "ops/unique/gpu/workspace.cuh"

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
  const bool watched = IsWatched();
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

uint64_t GpuTable::Evict(cudaStream_t stream) {
  const Turn turn(this, stream);
  return policies_.evict() ? EvictShards(policies_.all_shards(), true, stream) : 0;
}

void GpuTable::EvictFor(const int64_t* keys, int64_t n, cudaStream_t stream) {
  if (!policies_.evict()) return;
  CheckCuda(cudaMemsetAsync(counters()->shards_met, 0, sizeof counters()->shards_met, stream),
            "clearing a counter");
  Launch(MeetShards, BlocksOf(n), kBlockThreads, 0, stream, "finding a batch's shards", keys,
         static_cast<uint32_t>(n), policies_.log2_shards(), counters());
  const GpuCounters now = ReadCounters(stream);
  policies_.NoteHalves(now.shard_halves);
  const uint64_t met = uint64_t{now.shards_met[1]} << 32 | now.shards_met[0];
  EvictShards(policies_.Full(met), false, stream);
}

void GpuTable::SweepDueShards(cudaStream_t stream) {
  if (!policies_.evict()) return;
  EvictShards(policies_.SweepDue(static_cast<uint64_t>(step_)), true, stream);
}

uint32_t GpuTable::Select(const Scan& scan, int64_t* keys, uint32_t* numbers, uint32_t* live,
                          uint32_t* found, cudaStream_t stream) {
  CheckCuda(cudaMemsetAsync(&counters()->selected, 0, sizeof counters()->selected, stream),
            "clearing a counter");
  WithRows([&](const auto& rows) {
    using Rows = std::decay_t<decltype(rows)>;
    Launch(SelectRows<Rows>, BlocksOf(slot_count()), kBlockThreads, 0, stream, "scanning a table",
           index(), rows, scan, keys, numbers, live, found);
  });
  const GpuCounters now = ReadCounters(stream);
  policies_.NoteHalves(now.shard_halves);
  return now.selected;
}

uint64_t GpuTable::EvictShards(uint64_t shards, bool sweep, cudaStream_t stream) {
  if (shards == 0) return 0;
  InstallMoves(0, stream);
  const Scan scan{{0, kLogicalShards}, 0, shards, policies_.log2_shards()};
  const uint32_t count = Select(scan, nullptr, nullptr, nullptr, nullptr, stream);
  if (count == 0) return 0;
  Workspace space(nullptr);
  const auto cut = [&](Workspace* from) {
    return std::make_tuple(from->Take<int64_t>(count), from->Take<uint32_t>(count),
                           from->Take<RowHeader>(count), from->Take<double>(count));
  };
  cut(&space);
  space = Workspace(Scratch(space.bytes(), stream));
  const auto [keys, numbers, headers, norms] = cut(&space);
  Select(scan, keys, numbers, nullptr, nullptr, stream);
  double* const wanted_norms = policies_.needs_norms() ? norms : nullptr;
  WithRows([&, numbers = numbers, headers = headers](const auto& rows) {
    using Rows = std::decay_t<decltype(rows)>;
    Launch(JudgeRows<Rows>, BlocksOf(count), kBlockThreads, 0, stream, "judging rows", rows,
           numbers, count, headers, wanted_norms);
  });
  std::vector<int64_t> host_keys(count);
  std::vector<uint32_t> host_numbers(count);
  std::vector<RowHeader> host_headers(count);
  std::vector<double> host_norms(policies_.needs_norms() ? count : 0);
  const auto read = [&](auto* to, const auto* from, size_t size) {
    CheckCuda(cudaMemcpyAsync(to, from, size * sizeof *to, cudaMemcpyDeviceToHost, stream),
              "reading rows to judge");
  };
  read(host_keys.data(), keys, count);
  read(host_numbers.data(), numbers, count);
  read(host_headers.data(), headers, count);
  if (!host_norms.empty()) read(host_norms.data(), norms, count);
  CheckCuda(cudaStreamSynchronize(stream), "reading rows to judge");
  std::vector<JudgedGpuRow> judged(count);
  for (uint32_t i = 0; i < count; ++i) {
    judged[i] = {host_keys[i], host_headers[i].frequency, host_headers[i].last_step,
                 host_norms.empty() ? 0.0 : host_norms[i],
                 half_ && HalfRule::IsHalf(host_numbers[i])};
  }
  const std::vector<int64_t> victims =
      policies_.Victims(judged, static_cast<uint32_t>(step_), sweep);
  EraseOnHost(victims, stream);
  if (!victims.empty()) EndEpochs(shards, stream);
  evictions_ += victims.size();
  return victims.size();
}

void GpuTable::EraseOnHost(const std::vector<int64_t>& keys, cudaStream_t stream) {
  if (keys.empty()) return;
  // Behind the keys is a counter that the kernel needs and nobody reads.
  auto* const space = static_cast<int64_t*>(Scratch(sizeof(int64_t) * (keys.size() + 1), stream));
  CheckCuda(cudaMemcpyAsync(space, keys.data(), sizeof(int64_t) * keys.size(),
                            cudaMemcpyHostToDevice, stream),
            "writing keys to evict");
  WithRows([&](const auto& rows) {
    using Rows = std::decay_t<decltype(rows)>;
    Launch(EraseKeys<Rows>, BlocksOf(keys.size()), kBlockThreads, 0, stream, "evicting rows",
           index(), rows, space, static_cast<uint32_t>(keys.size()), nullptr,
           reinterpret_cast<unsigned long long*>(space + keys.size()));
  });
  CheckCuda(cudaStreamSynchronize(stream), "evicting rows");
  NoteSize(ReadCounters(stream));
}

void GpuTable::RecountShards(cudaStream_t stream) {
  if (!policies_.decide()) return;
  auto* const live = static_cast<uint32_t*>(Scratch(sizeof(uint32_t) * kLogicalShards, stream));
  CheckCuda(cudaMemsetAsync(live, 0, sizeof(uint32_t) * kLogicalShards, stream),
            "clearing counts of shards");
  Select({{0, kLogicalShards}, 0, policies_.all_shards(), policies_.log2_shards()}, nullptr,
         nullptr, live, nullptr, stream);
  std::vector<uint32_t> counts(kLogicalShards);
  CheckCuda(cudaMemcpyAsync(counts.data(), live, sizeof(uint32_t) * kLogicalShards,
                            cudaMemcpyDeviceToHost, stream),
            "reading counts of shards");
  CheckCuda(cudaStreamSynchronize(stream), "reading counts of shards");
  policies_.Recount(counts.data());
}

}  // namespace gmeta
