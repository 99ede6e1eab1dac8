// How a GPU table evicts: which shards, decided on the host (policies.h), and which of their rows,
// decided on the GPU (device/eviction.cuh). The host reads how many rows were evicted, and their
// keys if a journal notes them.

#include <algorithm>
#include <cub/device/device_scan.cuh>
#include <type_traits>
#include <variant>
#include <vector>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/eviction.cuh"
#include "ops/table/gpu/table.cuh"
#include "ops/table/gpu/upkeep/stable_sort.cuh"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

// Rows that are judged together, unless one shard has more. It bounds the workspace.
constexpr uint64_t kMostJudged = uint64_t{1} << 21;

constexpr int kGroupBits = 7;
static_assert(kMostGroups == 1 << kGroupBits);

// What the host reads of an eviction.
struct Evicted {
  uint32_t starts[kMostGroups + 1];
  uint32_t victims[GpuCounters::kMostShards];
};

struct EvictionSpace {
  int64_t *keys, *sorted_keys;
  uint32_t *numbers, *sorted_numbers, *order, *sorted_order;
  uint64_t *ranks, *sorted_ranks;
  uint8_t *groups, *sorted_groups;
  uint32_t *halves, *halves_before;
  Evicted* evicted;
  void* temporary;  // CUB's
  size_t temporary_bytes;
};

EvictionSpace CutEvictionSpace(Workspace* space, size_t n, bool has_halves) {
  EvictionSpace s{};
  s.keys = space->Take<int64_t>(n);
  s.sorted_keys = space->Take<int64_t>(n);
  s.numbers = space->Take<uint32_t>(n);
  s.sorted_numbers = space->Take<uint32_t>(n);
  s.order = space->Take<uint32_t>(n);
  s.sorted_order = space->Take<uint32_t>(n);
  s.ranks = space->Take<uint64_t>(n);
  s.sorted_ranks = space->Take<uint64_t>(n);
  s.groups = space->Take<uint8_t>(n);
  s.sorted_groups = space->Take<uint8_t>(n);
  s.evicted = space->Take<Evicted>(1);
  s.temporary_bytes = std::max(
      {StableSortBytes<int64_t>(n), StableSortBytes<uint64_t>(n), StableSortBytes<uint8_t>(n)});
  if (has_halves) {
    s.halves = space->Take<uint32_t>(n + 1);
    s.halves_before = space->Take<uint32_t>(n + 1);
    size_t scan = 0;
    CheckCuda(cub::DeviceScan::ExclusiveSum(nullptr, scan, s.halves, s.halves_before, n + 1),
              "sizing a sum");
    s.temporary_bytes = std::max(s.temporary_bytes, scan);
  }
  s.temporary = space->Take<char>(s.temporary_bytes);
  return s;
}

}  // namespace

uint64_t GpuTable::Evict(int64_t at, uint64_t turns, cudaStream_t stream) {
  const Turn turn(this, stream);
  if (!policies_.evict()) return 0;
  return EvictShards(policies_.ShardsIn(turns), true, static_cast<uint32_t>(at < 0 ? step_ : at),
                     stream);
}

void GpuTable::EvictFor(const int64_t* keys, int64_t n, cudaStream_t stream) {
  // Usually no shard is full; then the batch needn't wait.
  if (!policies_.evict() || policies_.Full(policies_.all_shards(), nullptr) == 0) return;
  CheckCuda(cudaMemsetAsync(counters()->shards_met, 0, sizeof counters()->shards_met, stream),
            "clearing a counter");
  Launch(MeetShards, BlocksOf(n), kBlockThreads, 0, stream, "finding a batch's shards", keys,
         static_cast<uint32_t>(n), policies_.log2_shards(), counters());
  const GpuCounters now = ReadCounters(stream);
  const uint64_t met = uint64_t{now.shards_met[1]} << 32 | now.shards_met[0];
  EvictShards(policies_.Full(met, now.shard_halves), false, 0, stream);
}

void GpuTable::SweepDueShards(cudaStream_t stream) {
  if (!policies_.evict()) return;
  EvictShards(policies_.SweepDue(static_cast<uint64_t>(step_)), true, static_cast<uint32_t>(step_),
              stream);
}

uint64_t GpuTable::EvictShards(uint64_t shards, bool sweep, uint32_t now, cudaStream_t stream) {
  if (shards == 0) return 0;
  InstallMoves(0, stream);
  uint64_t evicted = 0;
  while (shards != 0) {
    uint64_t rows = 0;
    const uint64_t some = policies_.TakeShards(&shards, kMostJudged, &rows);
    if (rows != 0) evicted += EvictSome(some, static_cast<uint32_t>(rows), sweep, now, stream);
  }
  evictions_ += evicted;
  return evicted;
}

uint64_t GpuTable::EvictSome(uint64_t shards, uint32_t n, bool sweep, uint32_t now,
                             cudaStream_t stream) {
  Workspace space(nullptr);
  CutEvictionSpace(&space, n, half_.has_value());
  space = Workspace(Scratch(space.bytes(), stream));
  const EvictionSpace s = CutEvictionSpace(&space, n, half_.has_value());
  const auto sort = [&](const auto* by, auto* sorted_by, const uint32_t* from, uint32_t* to,
                        int bits) {
    StableSort(s.temporary, s.temporary_bytes, by, sorted_by, from, to, n, bits, stream);
  };
  const auto launch = [&](const auto& kernel, uint64_t threads, const char* what,
                          const auto&... arguments) {
    Launch(kernel, BlocksOf(threads), kBlockThreads, 0, stream, what, arguments...);
  };
  const int log2_shards = policies_.log2_shards();
  LaunchSelect({{0, kLogicalShards}, 0, shards, log2_shards}, s.keys, s.numbers, nullptr, nullptr,
               stream);
  sort(s.keys, s.sorted_keys, s.numbers, s.sorted_numbers, 64);
  std::visit(
      [&](const auto& policy) {
        using Policy = std::decay_t<decltype(policy)>;
        // Rows on disk are staged for a policy that reads weights.
        const bool stages = Policy::kReadsWeights && HasRowsOnDisk();
        const uint32_t most = stages ? std::min(n, MostStaged()) : n;
        for (uint32_t done = 0; done < n; done += most) {
          const uint32_t some = std::min(most, n - done);
          const uint32_t* numbers = s.sorted_numbers + done;
          if (stages) {
            CheckCuda(cudaMemcpyAsync(s.sorted_order, numbers, some * sizeof(uint32_t),
                                      cudaMemcpyDeviceToDevice, stream),
                      "copying numbers of rows");
            Stage(s.sorted_order, some, stream);
            numbers = s.sorted_order;
          }
          WithRows([&](const auto& rows) {
            launch(JudgeRows<std::decay_t<decltype(rows)>, Policy>, some, "judging rows", rows,
                   policy, s.sorted_keys, numbers, done, some, now, sweep, log2_shards, s.ranks,
                   s.groups, s.order);
          });
        }
      },
      policies_.eviction_policy());
  sort(s.ranks, s.sorted_ranks, s.order, s.sorted_order, 64);
  launch(OrderGroups, n, "ordering groups", s.groups, s.sorted_order, n, s.sorted_groups);
  sort(s.sorted_groups, s.groups, s.sorted_order, s.order, kGroupBits);
  const ArrangedRows arranged{s.keys,   s.numbers,       s.groups, s.evicted->starts,
                              s.halves, s.halves_before, n};
  launch(ArrangeRows, uint64_t{n} + 1, "arranging rows", s.sorted_keys, s.sorted_numbers, s.order,
         arranged);
  if (half_) {
    size_t bytes = s.temporary_bytes;
    CheckCuda(
        cub::DeviceScan::ExclusiveSum(s.temporary, bytes, s.halves, s.halves_before, n + 1, stream),
        "summing half rows");
  }
  uint32_t* const victims = s.evicted->victims;
  CheckCuda(cudaMemsetAsync(victims, 0, sizeof s.evicted->victims, stream),
            "clearing counts of victims");
  const EvictionMarks marks{marks_.as<const ShardMarks>(), policies_.row_charge(),
                            policies_.half_saves()};
  WithRows([&](const auto& rows) {
    launch(EvictRows<std::decay_t<decltype(rows)>>, n, "evicting rows", index(), rows, arranged,
           marks, victims);
  });
  Evicted evicted;
  CheckCuda(cudaMemcpyAsync(&evicted, s.evicted, sizeof evicted, cudaMemcpyDeviceToHost, stream),
            "reading what was evicted");
  NoteSize(ReadCounters(stream));
  return NoteEvicted(evicted.starts, evicted.victims, s.keys, stream);
}

uint64_t GpuTable::NoteEvicted(const uint32_t* starts, const uint32_t* victims, const int64_t* keys,
                               cudaStream_t stream) {
  uint64_t sum = 0, shards = 0;
  for (size_t i = 0; i < policies_.shards(); ++i) {
    sum += victims[i];
    shards |= uint64_t{victims[i] != 0} << i;
  }
  if (sum == 0) return 0;
  EndEpochs(shards, stream);
  const bool journal = policies_.has_journal();
  std::vector<int64_t> gone(journal ? sum : 0);
  int64_t* to = gone.data();
  for (size_t i = 0; journal && i < policies_.shards(); to += victims[i++]) {
    CheckCuda(cudaMemcpyAsync(to, keys + starts[2 * i], sizeof(int64_t) * victims[i],
                              cudaMemcpyDeviceToHost, stream),
              "reading evicted keys");
  }
  if (journal) CheckCuda(cudaStreamSynchronize(stream), "reading evicted keys");
  const int64_t* from = journal ? gone.data() : nullptr;
  for (size_t i = 0; i < policies_.shards(); ++i) {
    policies_.Evicted(i, from, victims[i]);
    if (journal) from += victims[i];
  }
  return sum;
}

}  // namespace gmeta
