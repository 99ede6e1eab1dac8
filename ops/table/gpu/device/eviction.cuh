// The kernels by which a GPU table evicts rows (ops/table/core/eviction.h), with the result of the
// CPU's Shard::MakeRoom.
//
//   GatherRows     the rows of the shards that may evict, those of a shard together
//   JudgeRows      the rank of each row, and whether it is expired
//   SearchVictims  the rank and key of the last victim of each shard, digit by digit
//   EvictRows      removes the victims
//
// The CPU removes the row of the lowest rank, and of the lowest key among rows of equal rank, as
// long as the shard's load is above a low mark. So a row is a victim if the load of the rows from
// it on, in this order, is above a low mark. Rows needn't be sorted for it: the last victim is
// found like the k-th smallest number by a radix selection, with loads in place of numbers of rows.
// Its rank and key together have sixteen digits of eight bits. A pass counts, by one digit, the
// rows that agree with the digits found so far, and half rows separately, since they charge less.
// The last block of a shard that ends the pass adds the counts up from the highest digit on. The
// digit at which the load first exceeds the low mark is that of the last victim. All shards take a
// pass together. A pass reads nine bytes a row, mostly from the second cache, and passes with
// nothing left to find end at once.
//
// Expired rows are victims, whatever their rank, and don't count.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_EVICTION_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_EVICTION_CUH_

#include <cstdint>

#include "ops/common/murmur_hash3.h"
#include "ops/table/core/eviction.h"
#include "ops/table/core/half_rule.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

// A row as eviction policies see it.
struct JudgedGpuRow {
  RowHeader header;
  double squared_norm;

  GMETA_HOST_DEVICE uint32_t frequency() const { return header.frequency; }
  GMETA_HOST_DEVICE uint32_t last_step() const { return header.last_step; }
  GMETA_HOST_DEVICE double SquaredNorm() const { return squared_norm; }
};

// The square of the L2 norm of the weights, summed in float64 and in the order of the elements, as
// on the CPU.
template <class Rows>
__device__ double SquaredNormOf(const Rows& rows, uint32_t row) {
  const auto record = rows.record(row);
  double sum = 0.0;
  for (uint32_t i = 0; i < rows.dim; ++i) {
    const double weight = record.Weights(record.template Load<float>(i));
    sum += weight * weight;
  }
  return sum;
}

// The rows of some shards, those of shard i from number starts[i] to starts[i + 1].
struct JudgedRows {
  static constexpr uint8_t kExpired = 1, kHalf = 2;

  int64_t* keys;
  uint32_t* numbers;
  uint64_t* ranks;
  uint8_t* flags;
  const uint32_t* starts;
};

// Slots of the index that a thread reads.
inline constexpr uint32_t kGatherSlots = 4;

// Gathers the rows of some shards (as bits) from a part of the index, those of a shard in any
// order. places[i] is where the next row of shard i goes, and moves on: for all rows of a block
// together.
__global__ void __launch_bounds__(kBlockThreads)
    GatherRows(const KeySlot* slots, uint64_t count, uint64_t shards, int log2_shards,
               JudgedRows judged, uint32_t* places) {
  __shared__ uint32_t rows[GpuCounters::kMostShards], begins[GpuCounters::kMostShards];
  constexpr uint32_t kNoShard = GpuCounters::kMostShards;
  if (threadIdx.x < GpuCounters::kMostShards) rows[threadIdx.x] = 0;
  __syncthreads();
  KeySlot read[kGatherSlots];
  uint32_t shard[kGatherSlots], place[kGatherSlots];
#pragma unroll
  for (uint32_t i = 0; i < kGatherSlots; ++i) {
    const uint64_t at = (uint64_t{blockIdx.x} * kGatherSlots + i) * kBlockThreads + threadIdx.x;
    read[i] = at < count ? ReadSlot(slots + at) : KeySlot{};
  }
#pragma unroll
  for (uint32_t i = 0; i < kGatherSlots; ++i) {
    shard[i] = static_cast<uint32_t>(MurmurHash3(read[i].key) >> 1 >> (63 - log2_shards));
    if (read[i].entry == kNoEntry || (shards >> shard[i] & 1) == 0) shard[i] = kNoShard;
    if (shard[i] != kNoShard) place[i] = atomicAdd(rows + shard[i], 1u);
  }
  __syncthreads();
  if (threadIdx.x < GpuCounters::kMostShards && rows[threadIdx.x] != 0) {
    begins[threadIdx.x] = atomicAdd(places + threadIdx.x, rows[threadIdx.x]);
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kGatherSlots; ++i) {
    if (shard[i] == kNoShard) continue;
    judged.keys[begins[shard[i]] + place[i]] = read[i].key;
    judged.numbers[begins[shard[i]] + place[i]] = read[i].entry - 1;
  }
}

// Judges n rows from number `first` on. numbers[i - first] is where row i is read. Rows expire only
// in a sweep.
template <class Rows, class Policy>
__global__ void __launch_bounds__(kBlockThreads)
    JudgeRows(Rows rows, Policy policy, JudgedRows judged, const uint32_t* numbers, uint32_t first,
              uint32_t n, uint32_t now, bool sweep) {
  if (GlobalThread() >= n) return;
  const uint32_t number = numbers[GlobalThread()];
  const uint64_t at = first + GlobalThread();
  JudgedGpuRow row{*rows.header(number), 0.0};
  if (Policy::kReadsWeights) row.squared_norm = SquaredNormOf(rows, number);
  judged.ranks[at] = policy.Rank(row);
  const bool half = Rows::kMixed && HalfRule::IsHalf(judged.numbers[at]);
  judged.flags[at] =
      static_cast<uint8_t>((sweep && policy.Expired(row, now) ? JudgedRows::kExpired : 0) |
                           (half ? JudgedRows::kHalf : 0));
}

// A row's place in the order of eviction. Its digits are numbered from the highest on.
struct EvictionPlace {
  static constexpr int kDigits = 16;

  uint64_t rank, key;

  __device__ static EvictionPlace Of(uint64_t rank, int64_t key) {
    return {rank, static_cast<uint64_t>(key) ^ uint64_t{1} << 63};
  }
  __device__ uint32_t digit(int i) const {
    return static_cast<uint32_t>((i < 8 ? rank : key) >> (56 - i % 8 * 8)) & 0xff;
  }
  // Whether the first n digits are those of another place.
  __device__ bool Agrees(const EvictionPlace& other, int n) const {
    const uint64_t ranks = rank ^ other.rank, keys = key ^ other.key;
    if (n <= 8) return n == 0 || ranks >> (64 - n * 8) == 0;
    return ranks == 0 && keys >> (128 - n * 8) == 0;
  }
  __device__ bool IsAfter(const EvictionPlace& other) const {
    return rank != other.rank ? rank > other.rank : key > other.key;
  }
  // Sets digit i, and the digits after it to their maximum.
  __device__ void Set(int i, uint32_t digit) {
    uint64_t& word = i < 8 ? rank : key;
    const int shift = 56 - i % 8 * 8;
    word = (word & ~(uint64_t{0xff} << shift)) | uint64_t{digit} << shift |
           ((uint64_t{1} << shift) - 1);
    if (i < 8) key = ~uint64_t{0};
  }
};

// The search for the last victim of a shard. It begins as zeros.
struct VictimSearch {
  enum State : uint32_t { kSearching, kFound, kNone };
  static constexpr uint32_t kBins = 256;

  uint32_t rows[kBins], halves[kBins];  // by their next digit
  EvictionPlace last;                   // its first digits are found, the others at their maximum
  uint32_t rows_after, halves_after;    // rows after all places that `last` may have
  uint32_t blocks_done;
  uint32_t state;
};

// The marks of the shards, and what rows charge.
struct EvictionMarks {
  const ShardMarks* shards;
  uint64_t row_charge;
  uint64_t half_saves;

  __device__ uint64_t Charge(uint32_t rows, uint32_t halves) const {
    return rows * row_charge - halves * half_saves;
  }
  __device__ bool IsFull(uint32_t shard, uint32_t rows, uint32_t halves) const {
    return shards[shard].IsFull(rows, Charge(rows, halves));
  }
  __device__ bool IsAboveLow(uint32_t shard, uint32_t rows, uint32_t halves) const {
    return shards[shard].IsAboveLow(rows, Charge(rows, halves));
  }
};

// Finds digit number `digit` of the last victim from a shard's counts, which it clears. A block
// with a thread for each bin calls it.
__device__ inline void FindDigit(VictimSearch* search, int digit, uint32_t shard,
                                 const EvictionMarks& marks) {
  constexpr uint32_t kBins = VictimSearch::kBins;
  static_assert(kBlockThreads == kBins);
  // Of all bins from this thread's on; the first thread has the highest bin.
  __shared__ uint32_t rows[kBins], halves[kBins];
  const uint32_t at = threadIdx.x, bin = kBins - 1 - at;
  const uint32_t own_rows = __ldcg(search->rows + bin), own_halves = __ldcg(search->halves + bin);
  rows[at] = own_rows;
  halves[at] = own_halves;
  search->rows[bin] = search->halves[bin] = 0;
  __syncthreads();
  for (uint32_t step = 1; step < kBins; step *= 2) {
    const uint32_t more = at >= step ? rows[at - step] : 0;
    const uint32_t more_halves = at >= step ? halves[at - step] : 0;
    __syncthreads();
    rows[at] += more;
    halves[at] += more_halves;
    __syncthreads();
  }
  const uint32_t after = search->rows_after, halves_after = search->halves_after;
  const auto is_above = [&](uint32_t i) {
    return marks.IsAboveLow(shard, after + rows[i], halves_after + halves[i]);
  };
  // Before the first digit, a shard may turn out to be below its high mark without expired rows.
  const bool evicts = (digit != 0 || marks.IsFull(shard, rows[kBins - 1], halves[kBins - 1])) &&
                      is_above(kBins - 1);
  __syncthreads();
  if (at == 0) {
    search->blocks_done = 0;
    if (!evicts) search->state = VictimSearch::kNone;
  }
  if (!evicts || !is_above(at) || (at > 0 && is_above(at - 1))) return;
  search->last.Set(digit, bin);
  search->rows_after = after + rows[at] - own_rows;
  search->halves_after = halves_after + halves[at] - own_halves;
  if (own_rows == 1 || digit == EvictionPlace::kDigits - 1) search->state = VictimSearch::kFound;
}

// A pass of the search. `blocks` blocks share the rows of each shard.
__global__ void __launch_bounds__(kBlockThreads)
    SearchVictims(JudgedRows judged, uint32_t blocks, int digit, EvictionMarks marks,
                  VictimSearch* searches) {
  constexpr uint32_t kBins = VictimSearch::kBins;
  __shared__ uint32_t rows[kBins], halves[kBins];
  __shared__ bool is_last;
  const uint32_t shard = blockIdx.x / blocks, end = judged.starts[shard + 1];
  VictimSearch* const search = searches + shard;
  if (search->state != VictimSearch::kSearching || end == judged.starts[shard]) return;
  rows[threadIdx.x] = halves[threadIdx.x] = 0;
  const EvictionPlace last = search->last;
  __syncthreads();
  for (uint32_t base = judged.starts[shard] + blockIdx.x % blocks * kBlockThreads; base < end;
       base += blocks * kBlockThreads) {
    const uint32_t at = base + threadIdx.x;
    uint8_t flags = JudgedRows::kExpired;
    if (at < end) flags = judged.flags[at];
    bool counts = (flags & JudgedRows::kExpired) == 0;
    EvictionPlace place{};
    if (counts) {
      // The key matters only among rows of the last victim's rank.
      const bool by_key = digit >= 8 && judged.ranks[at] == last.rank;
      place = EvictionPlace::Of(judged.ranks[at], by_key ? judged.keys[at] : 0);
      counts = (digit < 8 || by_key) && place.Agrees(last, digit);
    }
    // Neighbours often have the same digit: one lane counts for all of them.
    const uint32_t bin = counts ? place.digit(digit) : kBins;
    const bool half = counts && (flags & JudgedRows::kHalf) != 0;
    const uint32_t peers = __match_any_sync(kFullWarp, bin);
    const uint32_t half_peers = __ballot_sync(kFullWarp, half) & peers;
    if (counts && threadIdx.x % kWarp == static_cast<uint32_t>(__ffs(peers) - 1)) {
      atomicAdd(rows + bin, static_cast<uint32_t>(__popc(peers)));
      if (half_peers != 0) atomicAdd(halves + bin, static_cast<uint32_t>(__popc(half_peers)));
    }
  }
  __syncthreads();
  if (rows[threadIdx.x] != 0) atomicAdd(search->rows + threadIdx.x, rows[threadIdx.x]);
  if (halves[threadIdx.x] != 0) atomicAdd(search->halves + threadIdx.x, halves[threadIdx.x]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&search->blocks_done, 1u) == blocks - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  FindDigit(search, digit, shard, marks);
}

// Removes the victims, and counts those of each shard. Lists their keys if `gone` is given, with
// *listed as their number. `blocks` blocks share the rows of each shard.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    EvictRows(IndexView index, Rows rows, JudgedRows judged, uint32_t blocks,
              const VictimSearch* searches, uint32_t* victims, int64_t* gone, uint32_t* listed) {
  __shared__ uint32_t shared[1];
  const BlockCount count(shared);
  const uint32_t shard = blockIdx.x / blocks, end = judged.starts[shard + 1];
  const VictimSearch& search = searches[shard];
  for (uint32_t base = judged.starts[shard] + blockIdx.x % blocks * kBlockThreads; base < end;
       base += blocks * kBlockThreads) {
    const uint32_t at = base + threadIdx.x;
    bool goes = false;
    if (at < end) {
      goes = (judged.flags[at] & JudgedRows::kExpired) != 0 ||
             (search.state == VictimSearch::kFound &&
              !EvictionPlace::Of(judged.ranks[at], judged.keys[at]).IsAfter(search.last));
    }
    const int64_t key = goes ? judged.keys[at] : 0;
    const uint32_t entry = Erase(index, key, goes);
    rows.Give(entry != kNoEntry, key, entry - 1);
    count.Add(goes);
    if (gone != nullptr) ListKeys(key, goes, gone, listed);
  }
  __syncthreads();
  if (threadIdx.x == 0 && count.sum() != 0) atomicAdd(victims + shard, count.sum());
}

// Sets the bits in counters->shards_met of the shards, out of 2^log2_shards, that have keys of a
// batch.
__global__ void __launch_bounds__(kBlockThreads)
    MeetShards(const int64_t* keys, uint32_t n, int log2_shards, GpuCounters* counters) {
  __shared__ uint32_t met[2];
  if (threadIdx.x < 2) met[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  if (at < n) {
    const uint32_t shard = static_cast<uint32_t>(MurmurHash3(keys[at]) >> 1 >> (63 - log2_shards));
    atomicOr(met + shard / 32, 1u << shard % 32);
  }
  __syncthreads();
  if (threadIdx.x < 2 && met[threadIdx.x] != 0) {
    atomicOr(counters->shards_met + threadIdx.x, met[threadIdx.x]);
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_EVICTION_CUH_
