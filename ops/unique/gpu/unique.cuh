// The distinct ids of a batch in the order of their first appearance, and the inverse, on the GPU.
//
// The scratch table holds 32-bit positions. It is at most half full and uses linear probing. A slot
// holds no id, only a position of the id in the batch: 4 bytes a slot, so the scratch of a million
// ids is 8 MB and, with the ids, stays in the L2 cache. Every int64 is a valid id.
//
//   1. Claim. Each position finds the slot of its id. It takes an empty slot by compare-and-swap,
//      and lowers a larger position of its id to its own. So afterwards a slot holds the first
//      position of its id, whatever the order of the threads. Ids mostly come in the order of the
//      batch, so few have to lower anything: a frequent id costs a cached load an occurrence and
//      hardly an atomic. Slots never change their id, so a stale load from the first cache does no
//      harm: it shows an empty slot, which the compare-and-swap corrects, or a later position of
//      the same id.
//   2. Mark. A position is first if its slot holds it: one bit each, counted by stretches of the
//      batch.
//   3. Number. A first position's place is the number of first positions before it. Keys are
//      written to their places. Places are written into the slots, over the positions, which are
//      no longer needed.
//   4. Answer. inverse[i] is the content of the slot of position i.
//
// By owner: keys are ordered by owner (owner_order.cuh) before the last step. unique_steps.cuh has
// the kernels.

#ifndef GMETA_OPS_UNIQUE_GPU_UNIQUE_CUH_
#define GMETA_OPS_UNIQUE_GPU_UNIQUE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace gmeta {

// Host interface, which the table uses too: see unique_abi.h. If `ranks` is 0, keys aren't sorted
// by owner.
size_t UniqueBytes(int64_t n, int32_t ranks);
void Unique(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys, int32_t* inverse,
            int32_t* counts, int32_t* count, void* workspace, cudaStream_t stream);

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_GPU_UNIQUE_CUH_
