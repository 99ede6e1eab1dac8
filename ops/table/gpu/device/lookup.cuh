// Lookups, in two kernels.
//
// FindRows looks keys up and copies the rows that it finds: all of them, in training that has
// warmed up. A warp takes 32 keys. It finds them together (FindEntries); then groups of its lanes
// copy rows, each lane 16 bytes of eight rows at a time, all loaded before the first is stored.
// Each warp has some 4 KB in flight in either half of the kernel, and tens of warps are on a
// multiprocessor, some in one half and some in the other.
//   For missing keys, it writes the initial row, or, if the lookup may insert, notes the positions.
//   For a peek, it writes stamps as well; for a reread, it copies only rows whose stamps have
//   changed (stamps.cuh).
//
// InsertRows takes the noted positions, inserts their keys, and writes initial rows to the output.
// One of the occurrences of a key also writes the initial row to the record. The kernel reads no
// record that it writes, so occurrences needn't wait for each other. If no position was noted, it
// costs only its launch.
//
// Both are compiled for tables of one form of rows and of two (mixed_rows.cuh). In a table of two
// forms, MoveMisfits (forms.cuh) runs after them.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_LOOKUP_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_LOOKUP_CUH_

#include <cstdint>

#include "ops/table/core/initializer.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/device/stamps.cuh"

namespace gmeta {

inline constexpr uint32_t kBlockThreads = 256;

__device__ inline uint64_t GlobalThread() {
  return uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// The number of blocks that together have at least `threads` threads.
inline uint32_t BlocksOf(uint64_t threads) {
  return static_cast<uint32_t>((threads + kBlockThreads - 1) / kBlockThreads);
}

// The floats of a vector: four if rows and pointers allow it, else one.
template <class Vec>
inline constexpr uint32_t kVecFloats = sizeof(Vec) / sizeof(float);

// How a warp is split for rows of `vectors` vectors: groups of 2^log2 lanes take a row each.
__host__ __device__ constexpr int Log2Lanes(uint32_t vectors) {
  int log2 = 0;
  while (log2 < 5 && (1u << log2) < vectors) ++log2;
  return log2;
}

// Computes vector c of the initial row of a key.
template <class Vec>
__device__ Vec InitialVector(const Initializer& initializer, int64_t key, uint32_t c) {
  float four[4];
  if constexpr (kVecFloats<Vec> == 4) {
    initializer.Block(key, c, four);
    return {four[0], four[1], four[2], four[3]};
  } else {
    initializer.Block(key, c / 4, four);
    return c % 4 == 0 ? four[0] : c % 4 == 1 ? four[1] : c % 4 == 2 ? four[2] : four[3];
  }
}

// A block's sum of its warps' counts, to add to a counter of the table.
class BlockCount {
 public:
  __device__ explicit BlockCount(uint32_t* shared) : sum_(shared) {
    if (threadIdx.x == 0) *sum_ = 0;
    __syncthreads();
  }
  __device__ void Add(bool counts) const {
    const uint32_t mask = __ballot_sync(kFullWarp, counts);
    if (threadIdx.x % kWarp == 0 && mask != 0) atomicAdd(sum_, __popc(mask));
  }
  // The sum. Call this after a barrier of the block.
  __device__ uint32_t sum() const { return *sum_; }

 private:
  uint32_t* sum_;
};

enum class Uses {
  kNone,      // reads only
  kDistinct,  // counts uses; no key occurs twice
  kShared,    // counts uses
};

// `Rows` is RowsView or MixedRowsView.
template <class Rows>
struct LookupBatch {
  IndexView index;
  Rows rows;
  const int64_t* keys;
  uint32_t n;
  float* out;
  uint32_t vectors;  // vectors per row
  uint32_t step;
  bool moves;  // whether a use changes a row's last step
  Initializer initializer;
  float initial_slot;
  uint32_t* missing;      // positions that FindRows leaves to InsertRows
  uint32_t turn;          // which of counters->missing counts them
  int64_t* rare_no_more;  // keys whose rows are to be promoted, for mixed rows only
  StampsView stamps;      // of a peek or a reread
};

// Appends the keys of a warp's `noted` lanes to a list of *count keys; those beyond `most` only
// count. The whole warp calls it.
__device__ inline void ListKeys(int64_t key, bool noted, int64_t* list, unsigned int* count,
                                uint32_t most = UINT32_MAX) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t mask = __ballot_sync(kFullWarp, noted);
  if (mask == 0) return;
  uint32_t place = 0;
  if (lane == 0) place = atomicAdd(count, static_cast<unsigned int>(__popc(mask)));
  place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
  if (noted && place < most) list[place] = key;
}

template <class Rows, class Vec, int kLog2Lanes, Uses kUses>
__global__ void __launch_bounds__(kBlockThreads) FindRows(const LookupBatch<Rows> batch) {
  using Record = typename Rows::Record;
  constexpr uint32_t kLanes = 1u << kLog2Lanes;
  constexpr uint32_t kRows = kWarp / kLanes;            // rows that the warp copies at once
  constexpr uint32_t kAhead = kRows >= 4 ? kLanes : 8;  // rows that a lane loads before it stores
  static_assert(kRows * kAhead <= kWarp);
  __shared__ uint32_t shared[2];
  const BlockCount hits(shared), changed(shared + 1);

  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const uint32_t first = at - lane;
  const bool active = at < batch.n;
  const int64_t key = active ? batch.keys[at] : 0;
  const uint32_t entry = FindEntries<false>(batch.index, key, active);
  const bool found = entry != kNoEntry;
  hits.Add(found);
  bool unchanged = false;  // whether the row is already there
  if (batch.stamps.is_used()) {
    const RowHeader* const header = found ? batch.rows.header(entry - 1) : nullptr;
    unchanged = active && batch.stamps.IsUnchanged(at, key, header, batch.step);
    changed.Add(active && !unchanged);
  }
  const Record record = found && !unchanged ? batch.rows.record(entry - 1) : Record();

  uint2* header = nullptr;
  uint2 header_was{};
  if (kUses == Uses::kDistinct && found) {
    header = reinterpret_cast<uint2*>(batch.rows.header(entry - 1));
    header_was = *header;
  }
  SharedTouch touch;
  if (kUses == Uses::kShared) {
    // If several lanes use the same row, one of them counts all uses.
    const uint32_t peers = __match_any_sync(kFullWarp, entry);
    if (found && lane == static_cast<uint32_t>(__ffs(peers) - 1)) {
      touch.Begin(batch.rows.header(entry - 1), batch.step, __popc(peers), batch.moves);
    }
  }

  const uint32_t column = lane % kLanes;
  for (uint32_t base = 0; base < kWarp; base += kRows * kAhead) {
    Record from[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      from[i] = record.OfLane(base + i * kRows + lane / kLanes);
    }
    Vec* const to = reinterpret_cast<Vec*>(batch.out) +
                    static_cast<size_t>(first + base + lane / kLanes) * batch.vectors;
    for (uint32_t c = column; c < batch.vectors; c += kLanes) {
      Vec row[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (from[i]) row[i] = from[i].template Load<Vec>(c);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (from[i]) {
          __stcs(to + static_cast<size_t>(i) * kRows * batch.vectors + c, from[i].Weights(row[i]));
        }
      }
    }
  }

  const uint32_t before_use = header_was.x;
  if (kUses == Uses::kDistinct && found) {
    header_was.x += header_was.x != UINT32_MAX;
    if (batch.moves) header_was.y = batch.step;
    *header = header_was;
  }
  if (kUses == Uses::kShared) touch.End();
  if constexpr (Rows::kMixed && kUses != Uses::kNone) {
    const HalfRule& rule = batch.rows.rule;
    uint32_t before = before_use, uses = kUses == Uses::kDistinct && found ? 1 : 0;
    if (kUses == Uses::kShared) before = touch.before(), uses = touch.uses();
    bool promoted = rule.EndsRarity(before, uses);
    if (rule.cools() && uses != 0) {  // also a row that was cold
      promoted = promoted || (HalfRule::IsHalf(entry - 1) && !rule.IsRare(before));
    }
    ListKeys(key, promoted, batch.rare_no_more, &batch.rows.counters->rare_no_more);
  }

  uint32_t missing = __ballot_sync(kFullWarp, active && !found);
  if (kUses == Uses::kNone) {
    missing &= ~__ballot_sync(kFullWarp, unchanged);
    for (; missing != 0; missing &= missing - 1) {
      const uint32_t which = __ffs(missing) - 1;
      const int64_t wanted = __shfl_sync(kFullWarp, key, which);
      Vec* const to =
          reinterpret_cast<Vec*>(batch.out) + static_cast<size_t>(first + which) * batch.vectors;
      for (uint32_t c = lane; c < batch.vectors; c += kWarp) {
        to[c] = Rows::Rounded(InitialVector<Vec>(batch.initializer, wanted, c));
      }
    }
  } else if (missing != 0) {
    uint32_t place = 0;
    if (lane == 0) {
      place = atomicAdd(&batch.rows.counters->missing[batch.turn], __popc(missing));
    }
    place = __shfl_sync(kFullWarp, place, 0) + __popc(missing & ((1u << lane) - 1));
    if (active && !found) batch.missing[place] = at;
  }

  __syncthreads();
  if (threadIdx.x == 0 && batch.stamps.changed != nullptr && changed.sum() != 0) {
    atomicAdd(batch.stamps.changed, static_cast<unsigned long long>(changed.sum()));
  }
  if (threadIdx.x == 0 && batch.stamps.written == nullptr) {
    const uint32_t keys = min(kBlockThreads, batch.n - blockIdx.x * kBlockThreads);
    GpuCounters* counters = batch.rows.counters;
    if (hits.sum() != 0) atomicAdd(&counters->hits, static_cast<unsigned long long>(hits.sum()));
    if (kUses == Uses::kNone && hits.sum() != keys) {
      atomicAdd(&counters->misses, static_cast<unsigned long long>(keys - hits.sum()));
    }
  }
}

// Inserts the keys of a warp's `wanted` lanes, which were absent when the kernel began, at a step
// of the table. Returns the entry of each lane's key. Sets *won if this lane's occurrence made the
// entry, with `header`. The whole warp calls it.
template <class Rows>
__device__ inline uint32_t InsertKeys(const IndexView& index, const Rows& rows, int64_t key,
                                      bool wanted, RowHeader header, uint32_t step, bool* won) {
  uint32_t entry = kNoEntry;
  while (__any_sync(kFullWarp, wanted)) {
    KeySlot* slot = nullptr;
    InsertStep done = InsertStep::kWait;
    if (wanted) done = TryInsert(index, key, &entry, &slot);
    __syncwarp();
    const bool claimed = done == InsertStep::kClaimed;
    const uint32_t mask = __ballot_sync(kFullWarp, claimed);
    if (mask != 0) {
      const uint32_t row = rows.Take(mask, claimed, key, rows.IsToBeHalf(key, header, step));
      if (claimed) {
        *rows.header(row) = header;
        entry = row + 1;
        *won = true;
        Publish(slot, key, entry);
      }
      index.Count(claimed, key, 1);
    }
    if (wanted && done == InsertStep::kNoRoom) atomicAdd(&rows.counters->homeless, 1u);
    if (done != InsertStep::kWait) wanted = false;
  }
  __threadfence();  // to see what others wrote before they published
  return entry;
}

// Writes the initial slots to the record of a new row. A group of lanes does so together.
template <class Vec, class Rows>
__device__ void WriteNewSlots(const LookupBatch<Rows>& batch, const typename Rows::Record& record,
                              uint32_t column, uint32_t lanes) {
  constexpr uint32_t kFloats = kVecFloats<Vec>;
  const uint32_t first = min(batch.rows.dim, batch.rows.slot_floats);
  for (uint32_t c = batch.vectors + column; c < batch.rows.stride / kFloats; c += lanes) {
    const uint32_t slot = c * kFloats - batch.rows.dim;
    const auto initial = [&](uint32_t i) { return slot + i < first ? batch.initial_slot : 0.0f; };
    if constexpr (kFloats == 4) {
      record.StoreSlots(c, Vec{initial(0), initial(1), initial(2), initial(3)});
    } else {
      record.StoreSlots(c, initial(0));
    }
  }
}

// Handles the positions that FindRows has noted, as many as the counter says. `admitted`, if given,
// is, for each position, whether its key gets a row.
template <class Rows, class Vec>
__global__ void __launch_bounds__(kBlockThreads)
    InsertRows(const LookupBatch<Rows> batch, const uint8_t* admitted, bool distinct) {
  using Record = typename Rows::Record;
  __shared__ uint32_t shared[3];
  if (threadIdx.x < 3) shared[threadIdx.x] = 0;
  __syncthreads();
  uint32_t* const inserts = shared;
  uint32_t* const doubles = shared + 1;
  uint32_t* const rejects = shared + 2;

  GpuCounters* const counters = batch.rows.counters;
  const uint32_t total = counters->missing[batch.turn];
  if (blockIdx.x == 0 && threadIdx.x == 0) counters->missing[batch.turn ^ 1] = 0;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t lanes = 1u << Log2Lanes(batch.vectors);
  for (uint32_t base = blockIdx.x * kBlockThreads + threadIdx.x - lane; base < total;
       base += gridDim.x * kBlockThreads) {
    const bool active = base + lane < total;
    const uint32_t position = active ? batch.missing[base + lane] : 0;
    const int64_t key = active ? batch.keys[position] : 0;
    const bool wanted = active && (admitted == nullptr || admitted[base + lane] != 0);
    bool won = false;
    const uint32_t entry = InsertKeys(batch.index, batch.rows, key, wanted,
                                      {distinct ? 1u : 0u, batch.step}, batch.step, &won);
    SharedTouch touch;
    if (!distinct && entry != kNoEntry) {
      touch.Begin(batch.rows.header(entry - 1), batch.step, 1, true);
      touch.End();
    }
    if constexpr (Rows::kMixed) {  // a single use promotes no row
      ListKeys(key, batch.rows.rule.EndsRarity(touch.before(), touch.uses()), batch.rare_no_more,
               &counters->rare_no_more);
    }

    if (won) atomicAdd(inserts, 1u);
    if (entry != kNoEntry && !won) atomicAdd(doubles, 1u);
    if (active && entry == kNoEntry) atomicAdd(rejects, 1u);

    const Record record = won ? batch.rows.record(entry - 1) : Record();
    for (uint32_t round = 0; round < lanes; ++round) {
      const uint32_t which = round * (kWarp / lanes) + lane / lanes;
      const int64_t its_key = __shfl_sync(kFullWarp, key, which);
      const uint32_t its_position = __shfl_sync(kFullWarp, position, which);
      const Record its_record = record.OfLane(which);
      if (base + which >= total) continue;
      Vec* const to =
          reinterpret_cast<Vec*>(batch.out) + static_cast<size_t>(its_position) * batch.vectors;
      for (uint32_t c = lane % lanes; c < batch.vectors; c += lanes) {
        const Vec initial = Rows::Rounded(InitialVector<Vec>(batch.initializer, its_key, c));
        to[c] = initial;
        if (its_record) its_record.StoreWeights(c, initial);
      }
      if (its_record) WriteNewSlots<Vec>(batch, its_record, lane % lanes, lanes);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    using Count = unsigned long long;
    if (*inserts != 0) atomicAdd(&counters->inserts, Count{*inserts});
    if (*doubles != 0) atomicAdd(&counters->hits, Count{*doubles});
    if (*rejects != 0) atomicAdd(&counters->rejects, Count{*rejects});
    if (*inserts + *rejects != 0) atomicAdd(&counters->misses, Count{*inserts} + *rejects);
  }
}

// Queue the kernels. If `vector` is true, a vector has four floats, else one.
template <class Rows>
void LaunchFind(const LookupBatch<Rows>& batch, bool vector, Uses uses, cudaStream_t stream);
template <class Rows>
void LaunchInsert(const LookupBatch<Rows>& batch, bool vector, const uint8_t* admitted,
                  bool distinct, cudaStream_t stream);

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_LOOKUP_CUH_
