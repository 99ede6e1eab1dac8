// Pipeline: finds the rows of a batch's keys in a key index and uses them.
//
// A pass takes blocks of 32 keys through four stages, so that many cache misses are in flight at
// once and a batch is bound by memory bandwidth rather than by latency:
//   1. hash the key, prefetch its home group           (one block ahead of the other stages)
//   2. find its row number
//   3. prefetch the record and the key's row in the caller's batch
//   4. read or update the record
// Each stage is a loop of its own, not a step of one loop over keys. A prefetch waits for its
// address translation before it retires, so misses overlap only within the processor's instruction
// window, which holds dozens of iterations of a short loop but three or four of a long one.

#ifndef GMETA_OPS_TABLE_HOST_KEY_PIPELINE_H_
#define GMETA_OPS_TABLE_HOST_KEY_PIPELINE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/common/murmur_hash3.h"
#include "ops/common/partition.h"
#include "ops/table/core/index/key_index.h"

namespace gmeta {

// Processes the items block by block: first calls ask(item, row), which prefetches, for each item
// of the block, then use(item, hash, row) for each. Both run in order; row may be kNoRow.
template <class Ask, class Use>
void Pipeline(const KeyIndex& index, BatchItems items, const Ask& ask, const Use& use) {
  constexpr size_t kBlock = 32;
  uint64_t hashes[2][kBlock];  // of this block and the next
  uint32_t rows[kBlock];
  const auto hash_block = [&](size_t begin, uint64_t* to) {
    const size_t end = std::min(items.size, begin + kBlock);
    for (size_t i = begin; i < end; ++i) {
      to[i - begin] = MurmurHash3(items.data[i].key);
      index.Prefetch(to[i - begin]);
    }
  };
  hash_block(0, hashes[0]);
  int side = 0;
  for (size_t begin = 0; begin < items.size; begin += kBlock, side ^= 1) {
    const BatchItem* block = items.data + begin;
    const uint64_t* hash = hashes[side];
    const size_t size = std::min(items.size - begin, kBlock);
    for (size_t i = 0; i < size; ++i) rows[i] = index.Find(block[i].key, hash[i]);
    for (size_t i = 0; i < size; ++i) ask(block[i], rows[i]);
    hash_block(begin + kBlock, hashes[side ^ 1]);
    for (size_t i = 0; i < size; ++i) use(block[i], hash[i], rows[i]);
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_KEY_PIPELINE_H_
