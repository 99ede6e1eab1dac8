// The distinct ids of a batch in the order of their first appearance, and the way back, on the GPU.
//
// A scratch table of 32-bit positions, at most half full, linear probing. A slot holds no id, only
// where in the batch one stands: 4 bytes a slot, so the scratch of a million ids is 8 MB and, with
// the ids, stays in the L2 cache. Every int64 is a valid id.
//
//   1. Claim. Each position finds the slot of its id: it takes an empty one by compare-and-swap,
//   and
//      lowers what it meets to its own position, if that is less. So afterwards a slot holds the
//      first position of its id, whatever the order of the threads. Ids are mostly met in the order
//      of the batch, so few have to lower anything: a frequent id costs a cached load an occurrence
//      and hardly an atomic. Slots never change their id, so a load from the first cache that is
//      out of date misleads nobody: it is an empty slot, which the compare-and-swap corrects, or a
//      later position of the same id.
//   2. Mark. A position is first if its slot holds it: one bit each, counted by stretches of the
//      batch.
//   3. Number. A first position's place is the count of those before it. Keys go to their places,
//      and places into the slots, over the positions, which nobody needs any more.
//   4. Answer. inverse[i] is what the slot of position i holds.
//
// By owner: the keys' places are sorted by owner, stably, before the last step. unique_steps.cuh
// has the kernels.

#ifndef GMETA_OPS_UNIQUE_GPU_UNIQUE_CUH_
#define GMETA_OPS_UNIQUE_GPU_UNIQUE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace gmeta {

// Host interface, for the table as well: see unique_abi.h. Where `ranks` is 0, keys aren't
// sorted by owner.
size_t UniqueBytes(int64_t n, int32_t ranks);
void Unique(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys, int32_t* inverse,
            int32_t* counts, int32_t* count, void* workspace, cudaStream_t stream);

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_GPU_UNIQUE_CUH_
