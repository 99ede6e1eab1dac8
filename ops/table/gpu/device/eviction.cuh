// The kernels by which a GPU table evicts rows (ops/table/core/eviction.h), with the result of the
// CPU's Shard::MakeRoom.
//
//   SelectRows   the rows of the shards that may evict, in any order (maintenance.cuh)
//   a sort       by key, because rows of equal rank are evicted by key
//   JudgeRows    the rank of each row, and its group: the shard, in it expired rows before others
//   two sorts    by rank, then by group; they are stable
//   ArrangeRows  keys and numbers in this order, and where each group begins
//   EvictRows    removes the victims
//
// In this order the victims of a shard are the first of its rows. The load of a shard without the
// rows before one is that of the rows from it on: their number, and their charge, which takes the
// number of half rows among them, a difference of two prefix sums. The CPU removes the row of the
// lowest rank as long as the load is above a low mark. So a row is a victim if the load from it on
// is above a low mark, and each thread decides by itself.

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

inline constexpr uint32_t kMostGroups = 2 * GpuCounters::kMostShards;

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

// Sets ranks[i], groups[i] and order[i] = i for n rows from number `first` on. numbers[i - first]
// is where row i is read. Rows expire only in a sweep.
template <class Rows, class Policy>
__global__ void __launch_bounds__(kBlockThreads)
    JudgeRows(Rows rows, Policy policy, const int64_t* keys, const uint32_t* numbers,
              uint32_t first, uint32_t n, uint32_t now, bool sweep, int log2_shards,
              uint64_t* ranks, uint8_t* groups, uint32_t* order) {
  if (GlobalThread() >= n) return;
  const uint32_t number = numbers[GlobalThread()];
  const uint64_t at = first + GlobalThread();
  JudgedGpuRow row{*rows.header(number), 0.0};
  if (Policy::kReadsWeights) row.squared_norm = SquaredNormOf(rows, number);
  const uint64_t shard = MurmurHash3(keys[at]) >> 1 >> (63 - log2_shards);
  ranks[at] = policy.Rank(row);
  groups[at] = static_cast<uint8_t>(2 * shard + !(sweep && policy.Expired(row, now)));
  order[at] = static_cast<uint32_t>(at);
}

// Sets ordered[i] to groups[order[i]].
__global__ void __launch_bounds__(kBlockThreads)
    OrderGroups(const uint8_t* groups, const uint32_t* order, uint32_t n, uint8_t* ordered) {
  const uint64_t at = GlobalThread();
  if (at < n) ordered[at] = groups[order[at]];
}

// Rows of some shards, in the order in which each shard evicts them.
struct ArrangedRows {
  int64_t* keys;
  uint32_t* numbers;
  const uint8_t* groups;
  uint32_t* starts;         // of each group; kMostGroups + 1
  uint32_t* halves;         // which rows are half, n + 1, the last 0; null if none is
  uint32_t* halves_before;  // the sums of `halves` before each row
  uint32_t n;
};

// Runs in n + 1 threads.
__global__ void __launch_bounds__(kBlockThreads)
    ArrangeRows(const int64_t* keys, const uint32_t* numbers, const uint32_t* order,
                ArrangedRows to) {
  const uint64_t at = GlobalThread();
  if (at > to.n) return;
  const uint32_t first = at == 0 ? 0 : to.groups[at - 1] + 1u;
  const uint32_t last = at == to.n ? kMostGroups : to.groups[at];
  for (uint32_t group = first; group <= last; ++group) to.starts[group] = static_cast<uint32_t>(at);
  uint32_t number = 0;
  if (at < to.n) {
    to.keys[at] = keys[order[at]];
    to.numbers[at] = number = numbers[order[at]];
  }
  if (to.halves != nullptr) to.halves[at] = HalfRule::IsHalf(number);
}

// The marks of the shards, and what rows charge.
struct EvictionMarks {
  const ShardMarks* shards;
  uint64_t row_charge;
  uint64_t half_saves;

  __device__ bool IsVictim(const ArrangedRows& rows, uint32_t at) const {
    const uint32_t group = rows.groups[at];
    if (group % 2 == 0) return true;  // it is expired
    const uint32_t end = rows.starts[group + 1], first = rows.starts[group];
    const ShardMarks& marks = shards[group / 2];
    return marks.IsFull(end - first, Charge(rows, first, end)) &&
           marks.IsAboveLow(end - at, Charge(rows, at, end));
  }

 private:
  __device__ uint64_t Charge(const ArrangedRows& rows, uint32_t first, uint32_t end) const {
    const uint64_t charge = (end - first) * row_charge;
    if (rows.halves == nullptr) return charge;
    return charge - (rows.halves_before[end] - rows.halves_before[first]) * half_saves;
  }
};

// Removes the victims. Sets victims[shard] to their number, if there are any.
template <class Rows>
__global__ void __launch_bounds__(kBlockThreads)
    EvictRows(IndexView index, Rows rows, ArrangedRows arranged, EvictionMarks marks,
              uint32_t* victims) {
  const uint64_t at = GlobalThread();
  if (at >= arranged.n || !marks.IsVictim(arranged, at)) return;
  const uint32_t shard = arranged.groups[at] / 2;
  const uint64_t next = at + 1;
  if (next == arranged.starts[2 * shard + 2] || !marks.IsVictim(arranged, next)) {
    victims[shard] = static_cast<uint32_t>(next - arranged.starts[2 * shard]);
  }
  const uint32_t entry = Erase(index, arranged.keys[at]);
  if (entry != kNoEntry) rows.Give(arranged.keys[at], entry - 1);
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
