// The pools of free row numbers of a GPU table, and the counters that are in GPU memory.
//
// A pool is a ring of the numbers of free rows. `taken` and `given` only ever increase: number i
// that is taken is ring[i % capacity]. A warp takes its rows by one atomic addition. A kernel may
// give rows back while it takes others, if at least as many rows as it takes were free when it
// began: the numbers that it takes were written before, and the numbers that it gives back go to
// places whose numbers were taken before.
//
// A store of rows has three pools: `near` of rows in GPU memory, `far` of rows in host memory
// (tiers/flights.cuh), `disk` of rows on disk (tiers/disk.cuh). A warp takes near rows if there are
// enough for all its lanes, else far ones. `ready` is the number of available ones: those that had
// been given back when the kernel began. Rows on disk get their numbers from the host.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_POOL_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_POOL_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"

namespace gmeta {

struct PoolCounters {
  unsigned long long taken, given;
  unsigned long long ready;  // kept for near rows, in tables that also have far ones

  __host__ __device__ uint64_t free() const { return given - taken; }
};

// The state of a store's pools, and of the rows that are on their way from one to the other. Such a
// row has a number of each pool.
struct StorePools {
  PoolCounters near, far, disk;
  unsigned long long moving;   // rows on their way
  unsigned long long leaving;  // those of them that leave GPU memory
};

// The counters on the GPU: those of statistics.h, and the state of pools and of half rows.
struct GpuCounters {
  static constexpr uint32_t kMostShards = 64;

  unsigned long long hits, misses, inserts, removes, updates, ignored, rejects;
  unsigned long long brought, spilled, crowded;
  StorePools full;             // of full rows
  unsigned int missing[2];     // keys that FindRows left to InsertRows; lookups alternate the two
  unsigned int selected;       // rows that a scan has found
  unsigned int shards_met[2];  // one bit per shard: whether it has keys of the batch
  // For tables of two precisions:
  unsigned int rare_no_more;  // keys whose rows are to be promoted
  unsigned int cold;          // keys whose rows have cooled down
  StorePools half;
  unsigned int shard_keys[kMostShards];    // rows of each shard, kept if the table evicts
  unsigned int shard_halves[kMostShards];  // half rows of each shard, also
  unsigned int part_keys[kMostParts];      // keys in each part of the index
  unsigned int homeless;                   // keys that a part had no slot for
};

struct PoolView {
  uint32_t* ring;
  uint32_t capacity;
  PoolCounters* counters;

  // The number at a place that was taken.
  __device__ uint32_t At(unsigned long long place) const { return ring[place % capacity]; }
  __device__ unsigned long long Take(uint32_t count) const {
    return atomicAdd(&counters->taken, static_cast<unsigned long long>(count));
  }
  // Takes numbers only if there are `count`; sets *first to the place of the first.
  __device__ bool TryTake(uint32_t count, unsigned long long* first) const {
    const unsigned long long ready = counters->ready;
    unsigned long long taken = *const_cast<volatile unsigned long long*>(&counters->taken);
    while (taken + count <= ready) {
      *first = taken;
      taken = atomicCAS(&counters->taken, *first, *first + count);
      if (taken == *first) return true;
    }
    return false;
  }
  // Gives back the numbers of a warp's `gives` lanes. The whole warp calls it.
  __device__ void Give(bool gives, uint32_t number) const {
    const uint32_t lane = threadIdx.x % kWarp, mask = __ballot_sync(kFullWarp, gives);
    if (mask == 0) return;
    unsigned long long place = 0;
    if (lane == 0) {
      place = atomicAdd(&counters->given, static_cast<unsigned long long>(__popc(mask)));
    }
    place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
    if (gives) ring[place % capacity] = number;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_POOL_CUH_
