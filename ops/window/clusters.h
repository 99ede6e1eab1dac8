// Divides the units of a batch, such as samples, into micro-batches so that units which share keys
// come together.
//
// A step in micro-batches holds the rows of each, so a key that several of them use is held longer,
// and the first of them waits for it. The best division is a cut of a hypergraph, and no batch has
// time for that. This is a streaming greedy: units are taken in their order, and each goes where
// most of its keys are.
//
// Layout. `keys` and `units` are pairs: a unit has a key. They are sorted by unit with a counting
// sort, into the numbers of the distinct keys (unique.h) of one unit after another. For each
// distinct key there are 4 bytes for how often it occurs, and a byte with a bit for each
// micro-batch that has it.
//
// Operation. A unit's score for a micro-batch is the sum over its keys of 1 / (how often the key
// occurs in the batch) where the micro-batch has the key, times the part of the micro-batch that is
// still free. So a key that all have has no influence, and no micro-batch fills up before the
// others have begun. Of equal scores the one with fewer units wins, then the first. Sizes are
// given, and each micro-batch gets exactly as many units as its size says.
//
// Why it is fast. A pair is hashed once and then costs a byte, a count and an addition for each of
// the at most 8 micro-batches that have its key. Nothing is sorted by comparison.

#ifndef GMETA_OPS_WINDOW_CLUSTERS_H_
#define GMETA_OPS_WINDOW_CLUSTERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/recycled.h"
#include "ops/unique/host/parallel_unique.h"
#include "ops/window/key_classes.h"

namespace gmeta {

// Writes the numbers of the units, one micro-batch after another, each in ascending order.
// Requires at most kMostMicroBatches sizes, whose sum is the number of units, fewer than 2^31
// pairs, and each of `units` in [0, that number).
template <class ParallelFor>
void ClusterUnits(const int64_t* keys, const int64_t* units, size_t n,
                  const std::vector<size_t>& sizes, int64_t* order,
                  const ParallelFor& parallel_for) {
  size_t total = 0;
  for (const size_t size : sizes) total += size;
  const auto distinct = MakeRecycled<int64_t>(n);
  const auto numbers = MakeRecycled<int32_t>(n);
  const size_t found = FindUnique(keys, n, distinct.get(), numbers.get(), parallel_for);
  std::vector<int32_t> occurs(found, 0);
  std::vector<size_t> ends(total + 1, 0);
  for (size_t i = 0; i < n; ++i) {
    ++occurs[numbers[i]];
    ++ends[units[i] + 1];
  }
  for (size_t unit = 0; unit < total; ++unit) ends[unit + 1] += ends[unit];
  const auto of_units = MakeRecycled<int32_t>(n);
  std::vector<size_t> next(ends.begin(), ends.end() - 1);
  for (size_t i = 0; i < n; ++i) of_units[next[units[i]]++] = numbers[i];

  std::vector<uint8_t> has(found, 0);
  std::vector<size_t> filled(sizes.size(), 0);
  std::vector<uint8_t> part_of(total);
  for (size_t unit = 0; unit < total; ++unit) {
    const int32_t* begin = of_units.get() + ends[unit];
    const int32_t* end = of_units.get() + ends[unit + 1];
    double scores[kMostMicroBatches] = {};
    for (const int32_t* key = begin; key < end; ++key) {
      const double weight = 1.0 / occurs[*key];
      for (unsigned bits = has[*key], part = 0; bits != 0; bits >>= 1, ++part) {
        if (bits & 1) scores[part] += weight;
      }
    }
    size_t best = sizes.size();
    for (size_t part = 0; part < sizes.size(); ++part) {
      if (filled[part] == sizes[part]) continue;
      scores[part] *= 1.0 - static_cast<double>(filled[part]) / static_cast<double>(sizes[part]);
      if (best == sizes.size() || scores[part] > scores[best] ||
          (scores[part] == scores[best] && filled[part] < filled[best])) {
        best = part;
      }
    }
    ++filled[best];
    part_of[unit] = static_cast<uint8_t>(best);
    for (const int32_t* key = begin; key < end; ++key) {
      has[*key] = static_cast<uint8_t>(has[*key] | 1u << best);
    }
  }

  std::vector<size_t> place(sizes.size(), 0);
  for (size_t part = 1; part < sizes.size(); ++part)
    place[part] = place[part - 1] + sizes[part - 1];
  for (size_t unit = 0; unit < total; ++unit) {
    order[place[part_of[unit]]++] = static_cast<int64_t>(unit);
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_WINDOW_CLUSTERS_H_
