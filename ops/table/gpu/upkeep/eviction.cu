// How a GPU table evicts: which shards, decided on the host (policies.h), and which of their rows,
// decided on the GPU (device/eviction.cuh). The host reads how many rows were evicted, and their
// keys if a journal notes them.

#include <algorithm>
#include <type_traits>
#include <variant>
#include <vector>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/eviction.cuh"
#include "ops/table/gpu/table.cuh"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

// Rows that are judged together, unless one shard has more. It bounds the workspace.
constexpr uint64_t kMostJudged = uint64_t{1} << 21;

// Rows that a block of a pass takes.
constexpr uint32_t kBlockRows = 4 * kBlockThreads;

struct EvictionSpace {
  JudgedRows judged;
  uint32_t* starts;  // of each shard; kMostShards + 1
  uint32_t* places;  // the next place of each shard while rows are selected
  uint32_t* staged;  // numbers of staged rows
  VictimSearch* searches;
  uint32_t* victims;  // of each shard
  int64_t* gone;      // their keys
  uint32_t* listed;
};

EvictionSpace CutEvictionSpace(Workspace* space, size_t n, bool stages, bool journal) {
  constexpr size_t kShards = GpuCounters::kMostShards;
  EvictionSpace s{};
  s.judged.keys = space->Take<int64_t>(n);
  s.judged.numbers = space->Take<uint32_t>(n);
  s.judged.ranks = space->Take<uint64_t>(n);
  s.judged.flags = space->Take<uint8_t>(n);
  s.judged.starts = s.starts = space->Take<uint32_t>(kShards + 1);
  s.places = space->Take<uint32_t>(kShards + 1);
  if (stages) s.staged = space->Take<uint32_t>(n);
  if (journal) s.gone = space->Take<int64_t>(n);
  s.searches = space->Take<VictimSearch>(kShards);
  s.victims = space->Take<uint32_t>(kShards);
  s.listed = space->Take<uint32_t>(1);
  return s;
}

}  // namespace

uint64_t GpuTable::Evict(int64_t at, uint64_t turns, cudaStream_t stream) {
  const Turn turn(this, stream);
  if (!policies_.evict()) return 0;
  NoteSize(ReadCounters(stream));
  return EvictShards(policies_.ShardsIn(turns), true, static_cast<uint32_t>(at < 0 ? step_ : at),
                     stream);
}

void GpuTable::EvictFor(const int64_t* keys, int64_t n, cudaStream_t stream) {
  if (!policies_.evict()) return;
  NoteAnswer();
  if (!policies_.MayBeFull(0)) return;  // then the batch needn't wait
  CheckCuda(cudaMemsetAsync(counters()->shards_met, 0, sizeof counters()->shards_met, stream),
            "clearing a counter");
  Launch(MeetShards, BlocksOf(n), kBlockThreads, 0, stream, "finding a batch's shards", keys,
         static_cast<uint32_t>(n), policies_.log2_shards(), counters());
  const GpuCounters now = ReadCounters(stream);
  NoteSize(now);
  const uint64_t met = uint64_t{now.shards_met[1]} << 32 | now.shards_met[0];
  EvictShards(policies_.Full(met, now.shard_halves), false, 0, stream);
}

void GpuTable::SweepDueShards(cudaStream_t stream) {
  const uint64_t due = policies_.evict() ? policies_.SweepDue(static_cast<uint64_t>(step_)) : 0;
  if (due == 0) return;
  NoteSize(ReadCounters(stream));
  EvictShards(due, true, static_cast<uint32_t>(step_), stream);
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
  const bool journal = policies_.has_journal(), on_disk = HasRowsOnDisk();
  Workspace space(nullptr);
  CutEvictionSpace(&space, n, on_disk, journal);
  space = Workspace(Scratch(space.bytes(), stream));
  const EvictionSpace s = CutEvictionSpace(&space, n, on_disk, journal);
  const auto count = static_cast<uint32_t>(policies_.shards());
  const std::vector<uint32_t> starts = policies_.StartsOf(shards);
  for (uint32_t* to : {s.starts, s.places}) {
    CheckCuda(cudaMemcpyAsync(to, starts.data(), starts.size() * sizeof(uint32_t),
                              cudaMemcpyHostToDevice, stream),
              "writing the starts of shards");
  }
  const auto clear = [&](auto* counts, size_t n) {
    CheckCuda(cudaMemsetAsync(counts, 0, n * sizeof *counts, stream), "clearing counts");
  };
  clear(s.searches, count);
  clear(s.victims, count);
  clear(s.listed, 1);
  index_.ForEachPart([&](const KeySlot* slots, uint64_t slot_count) {
    Launch(GatherRows, BlocksOf((slot_count + kGatherSlots - 1) / kGatherSlots), kBlockThreads, 0,
           stream, "gathering rows", slots, slot_count, shards, policies_.log2_shards(), s.judged,
           s.places);
  });
  std::visit(
      [&](const auto& policy) {
        using Policy = std::decay_t<decltype(policy)>;
        // Rows on disk are staged for a policy that reads weights.
        const bool stages = Policy::kReadsWeights && on_disk;
        const uint32_t most = stages ? std::min(n, MostStaged()) : n;
        for (uint32_t done = 0; done < n; done += most) {
          const uint32_t some = std::min(most, n - done);
          const uint32_t* numbers = s.judged.numbers + done;
          if (stages) {
            CheckCuda(cudaMemcpyAsync(s.staged, numbers, some * sizeof(uint32_t),
                                      cudaMemcpyDeviceToDevice, stream),
                      "copying numbers of rows");
            Stage(s.staged, some, stream);
            numbers = s.staged;
          }
          WithRows([&](const auto& rows) {
            Launch(JudgeRows<std::decay_t<decltype(rows)>, Policy>, BlocksOf(some), kBlockThreads,
                   0, stream, "judging rows", rows, policy, s.judged, numbers, done, some, now,
                   sweep);
          });
        }
      },
      policies_.eviction_policy());
  uint32_t longest = 1;
  for (uint32_t i = 0; i < count; ++i) longest = std::max(longest, starts[i + 1] - starts[i]);
  const uint32_t blocks = (longest + kBlockRows - 1) / kBlockRows;  // of a shard
  const EvictionMarks marks{marks_.as<const ShardMarks>(), policies_.row_charge(),
                            policies_.half_saves()};
  for (int digit = 0; digit < EvictionPlace::kDigits; ++digit) {
    Launch(SearchVictims, blocks * count, kBlockThreads, 0, stream, "searching victims", s.judged,
           blocks, digit, marks, s.searches);
  }
  WithRows([&](const auto& rows) {
    Launch(EvictRows<std::decay_t<decltype(rows)>>, blocks * count, kBlockThreads, 0, stream,
           "evicting rows", index(), rows, s.judged, blocks, s.searches, s.victims, s.gone,
           s.listed);
  });
  std::vector<uint32_t> victims(count);
  CheckCuda(cudaMemcpyAsync(victims.data(), s.victims, sizeof(uint32_t) * count,
                            cudaMemcpyDeviceToHost, stream),
            "reading what was evicted");
  NoteSize(ReadCounters(stream));
  return NoteEvicted(victims, s.gone, stream);
}

uint64_t GpuTable::NoteEvicted(const std::vector<uint32_t>& victims, const int64_t* gone,
                               cudaStream_t stream) {
  uint64_t sum = 0, shards = 0;
  for (size_t i = 0; i < victims.size(); ++i) {
    sum += victims[i];
    shards |= uint64_t{victims[i] != 0} << i;
  }
  if (sum == 0) return 0;
  EndEpochs(shards, stream);
  if (gone == nullptr) return sum;
  std::vector<int64_t> keys(sum);
  CheckCuda(
      cudaMemcpyAsync(keys.data(), gone, sizeof(int64_t) * sum, cudaMemcpyDeviceToHost, stream),
      "reading evicted keys");
  CheckCuda(cudaStreamSynchronize(stream), "reading evicted keys");
  for (const int64_t key : keys) policies_.Removed(key);
  return sum;
}

}  // namespace gmeta
