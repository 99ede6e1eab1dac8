// The statistics that a table keeps about itself.

#ifndef GMETA_OPS_TABLE_CORE_STATISTICS_H_
#define GMETA_OPS_TABLE_CORE_STATISTICS_H_

#include <atomic>
#include <cstdint>

namespace gmeta {

struct TableStatistics {
  uint64_t size = 0;      // keys now
  uint64_t capacity = 0;  // slots of the key index
  uint64_t bytes = 0;     // of index and rows, allocated
  // Counted since the table was made:
  uint64_t hits = 0;       // keys looked up and found
  uint64_t misses = 0;     // keys looked up and absent
  uint64_t inserts = 0;    // rows made by lookups
  uint64_t removes = 0;    // rows removed
  uint64_t updates = 0;    // rows updated by a gradient
  uint64_t ignored = 0;    // gradients of absent keys
  uint64_t rejects = 0;    // keys looked up and not admitted
  uint64_t evictions = 0;  // rows evicted
  // And now:
  uint64_t half_rows = 0;   // of `size`, in half precision
  uint64_t disk_rows = 0;   // of `size`, on disk
  uint64_t disk_bytes = 0;  // of the files
  // Counted since the table was made:
  uint64_t brought = 0;  // rows moved to the faster tier
  uint64_t spilled = 0;  // rows moved to the slower tier
  // Of tables in GPU memory and host memory:
  uint64_t host_rows = 0;  // of `size` now, in host memory
  uint64_t crowded = 0;    // rows that a prefetch found no room for
};

// A shard's share of the counts. Readers count too, so the counters are atomic and need no lock; a
// pass adds to them once.
class ShardCounters {
 public:
  using Counter = std::atomic<uint64_t>;

  Counter hits{0}, misses{0}, inserts{0}, removes{0}, updates{0}, ignored{0}, rejects{0},
      evictions{0};

  void Add(Counter ShardCounters::* counter, uint64_t amount) {
    (this->*counter).fetch_add(amount, std::memory_order_relaxed);
  }

  void AddTo(TableStatistics* sum) const {
    sum->hits += hits.load(std::memory_order_relaxed);
    sum->misses += misses.load(std::memory_order_relaxed);
    sum->inserts += inserts.load(std::memory_order_relaxed);
    sum->removes += removes.load(std::memory_order_relaxed);
    sum->updates += updates.load(std::memory_order_relaxed);
    sum->ignored += ignored.load(std::memory_order_relaxed);
    sum->rejects += rejects.load(std::memory_order_relaxed);
    sum->evictions += evictions.load(std::memory_order_relaxed);
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_STATISTICS_H_
