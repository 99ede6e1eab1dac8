// The distinct keys of a large batch in the order of their first appearance, on many threads, with
// the same result as on one (unique.h).
//
// Keys are first sorted by some bits of their hash (partition.h). Equal keys are in one part, so
// each part is made unique alone, in a scratch table that fits the cache near a core. A part's
// items are in the order of the batch, so the first item of a key is its first appearance. It
// remains to number the first appearances of all parts in the order of the batch: each is flagged
// at its position, flags are counted by slices of the batch, and a prefix sum says how many come
// before a slice. Nothing depends on the number of threads.
//
// Each id is hashed twice, moved once and looked up once, and 20 bytes of scratch an id are written
// and read. On a single thread unique.h, which moves nothing, is quicker; FindUnique chooses.

#ifndef GMETA_OPS_UNIQUE_HOST_PARALLEL_UNIQUE_H_
#define GMETA_OPS_UNIQUE_HOST_PARALLEL_UNIQUE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/partition.h"
#include "ops/common/recycled.h"
#include "ops/unique/host/unique.h"

namespace gmeta {

// Requires room for n < 2^31 numbers in `keys` and `inverse`. Returns the number of keys.
template <class ParallelFor>
size_t ParallelUnique(const int64_t* ids, size_t n, int64_t* keys, int32_t* inverse,
                      const ParallelFor& parallel_for) {
  constexpr size_t kIdsOfPart = 8192;
  constexpr int kMostLog2Parts = 8;
  constexpr size_t kSlice = 16384;
  int log2_parts = 0;
  while (log2_parts < kMostLog2Parts && kIdsOfPart << log2_parts < n) ++log2_parts;
  const Partition partition(ids, n, log2_parts, parallel_for);

  // From the start of a part's items in the partition: for each item the place of its key among the
  // part's keys, and for each key the position of its first appearance in the batch.
  const auto places = MakeRecycled<int32_t>(n);
  const auto firsts = MakeRecycled<uint32_t>(n);
  const auto is_first = MakeRecycled<uint8_t>(n);
  std::vector<size_t> found(partition.shards());
  const auto for_slices = [&](const auto& visit) {
    parallel_for((n + kSlice - 1) / kSlice, kSlice, [&](size_t first, size_t last) {
      for (size_t slice = first; slice < last; ++slice) {
        visit(slice, slice * kSlice, std::min(n, (slice + 1) * kSlice));
      }
    });
  };
  for_slices([&](size_t, size_t begin, size_t end) {
    std::fill(is_first.get() + begin, is_first.get() + end, uint8_t{0});
  });
  const auto for_parts = [&](size_t cost_of_id, const auto& visit) {
    const size_t cost = 1 + n / partition.shards() * cost_of_id;
    parallel_for(partition.shards(), cost, visit);
  };
  for_parts(6, [&](size_t first, size_t last) {
    UniqueFinder finder;
    std::vector<int64_t> distinct;
    for (size_t part = first; part < last; ++part) {
      const BatchItems items = partition[part];
      const size_t start = partition.start(part);
      distinct.resize(items.size);
      found[part] = finder.Find(
          items.size, [&items](size_t i) { return items.data[i].key; }, distinct.data(),
          places.get() + start);
      int32_t next = 0;
      for (size_t i = 0; i < items.size; ++i) {
        if (places[start + i] != next) continue;
        const uint32_t position = items.data[i].position;
        firsts[start + next++] = position;
        is_first[position] = 1;
      }
    }
  });

  std::vector<size_t> before((n + kSlice - 1) / kSlice + 1, 0);
  for_slices([&](size_t slice, size_t begin, size_t end) {
    size_t count = 0;
    for (size_t i = begin; i < end; ++i) count += is_first[i];
    before[slice + 1] = count;
  });
  for (size_t slice = 1; slice < before.size(); ++slice) before[slice] += before[slice - 1];
  // At a key's first position, `inverse` has its final value: the key's place.
  for_slices([&](size_t slice, size_t begin, size_t end) {
    size_t place = before[slice];
    for (size_t i = begin; i < end; ++i) {
      if (is_first[i] == 0) continue;
      keys[place] = ids[i];
      inverse[i] = static_cast<int32_t>(place++);
    }
  });
  for_parts(4, [&](size_t first, size_t last) {
    std::vector<int32_t> place_of;
    for (size_t part = first; part < last; ++part) {
      const BatchItems items = partition[part];
      const size_t start = partition.start(part);
      place_of.resize(found[part]);
      for (size_t key = 0; key < found[part]; ++key) place_of[key] = inverse[firsts[start + key]];
      for (size_t i = 0; i < items.size; ++i) {
        inverse[items.data[i].position] = place_of[places[start + i]];
      }
    }
  });
  return before.back();
}

// Does the same on one thread, or on many if there are enough ids and threads for sharing the work
// to save more than it adds. `parallel_for` also has threads(), their number.
template <class ParallelFor>
size_t FindUnique(const int64_t* ids, size_t n, int64_t* keys, int32_t* inverse,
                  const ParallelFor& parallel_for) {
  constexpr size_t kManyIds = 65536;
  constexpr int kManyThreads = 4;
  if (n >= kManyIds && parallel_for.threads() >= kManyThreads) {
    return ParallelUnique(ids, n, keys, inverse, parallel_for);
  }
  UniqueFinder finder;
  return finder.Find(n, [ids](size_t i) { return ids[i]; }, keys, inverse);
}

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_HOST_PARALLEL_UNIQUE_H_
