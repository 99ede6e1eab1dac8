// The stamps of rows on a GPU (ops/table/core/stamp.h): a peek writes them, a reread compares them.
//
// Each of the table's shards (policies.h) has an epoch. The host ends epochs, and writes their
// numbers to the GPU after the kernels that removed or overwrote rows.
//
// The kernels of a table don't overlap, so a peek reads rows and stamps at one moment although
// several threads do it, and lookups and updates keep the order of steps. Only an imported row may
// have a step that the table hasn't reached. It gets the stamp 0, which no row has later, until it
// is used.
//
// If a key occurs several times in a reread, one occurrence may see the step that another has
// written. That step is the table's own. A row was peeked with that step only after the table had
// reached it, and since then no update has run; so equal stamps are right then, too.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_STAMPS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_STAMPS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/common/murmur_hash3.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/stamp.h"

namespace gmeta {

struct StampsView {
  const uint32_t* epochs = nullptr;  // one per shard
  int log2_shards = 0;
  int64_t* written = nullptr;             // where a peek writes stamps
  const int64_t* peeked = nullptr;        // stamps that a reread compares
  unsigned long long* changed = nullptr;  // where a reread adds the number of changed rows

  __host__ __device__ bool is_used() const { return written != nullptr || peeked != nullptr; }

  // Writes or compares the stamp of the key at a position; `header` is null if it has no row.
  // Returns whether the row is unchanged since it was peeked.
  __device__ bool IsUnchanged(uint32_t position, int64_t key, const RowHeader* header,
                              uint32_t step) const {
    const uint32_t epoch = epochs[MurmurHash3(key) >> 1 >> (63 - log2_shards)];
    int64_t stamp = MissingStamp(epoch);
    if (header != nullptr) {
      const uint32_t last_step = *static_cast<const volatile uint32_t*>(&header->last_step);
      stamp = last_step <= step ? RowStamp(epoch, last_step) : 0;
    }
    if (written != nullptr) written[position] = stamp;
    return peeked != nullptr && stamp != 0 && peeked[position] == stamp;
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_STAMPS_CUH_
