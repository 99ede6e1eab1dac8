// Ranks the rows of a shard under an eviction policy (eviction.h): one walk over the index, then
// one over the records, which it prefetches.

#ifndef GMETA_OPS_TABLE_HOST_ROW_RANKING_H_
#define GMETA_OPS_TABLE_HOST_ROW_RANKING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/table/core/eviction.h"
#include "ops/table/core/index/key_index.h"

namespace gmeta {

// A row, as eviction policies see it. Rows is one of the classes in rows.h.
template <class Rows>
struct JudgedRow {
  const Rows* rows;
  int64_t key;
  uint32_t row;
  std::vector<float>* weights;  // a buffer for the weights of one row

  uint32_t frequency() const { return rows->header(row)->frequency; }
  uint32_t last_step() const { return rows->header(row)->last_step; }
  // Summed in float64 and in the order of the elements, so that a reference model can compute the
  // same number.
  double SquaredNorm() const {
    rows->CopyWeights(row, weights->data());
    double sum = 0.0;
    for (const float w : *weights) sum += static_cast<double>(w) * static_cast<double>(w);
    return sum;
  }
};

// Returns all rows with their ranks, except those that `remove` removes. It calls remove(row) for
// each row, which returns whether it removed the row.
template <class Policy, class Rows, class Remove>
std::vector<RankedRow> RankRows(const Policy& policy, const KeyIndex& index, const Rows& rows,
                                size_t dim, const Remove& remove) {
  constexpr size_t kAhead = 16, kPiece = 1024;
  std::vector<RankedRow> ranked;
  ranked.reserve(index.size());
  index.ForEach([&](int64_t key, uint32_t row) { ranked.push_back({0, key, row}); });
  std::vector<float> weights(dim);
  size_t kept = 0;
  for (size_t i = 0; i < ranked.size(); ++i) {
    if (Policy::kReadsWeights && i % kPiece == 0) {
      rows.Load(ranked.data() + i, std::min(kPiece, ranked.size() - i));
    }
    if (i + kAhead < ranked.size()) rows.PrefetchHeader(ranked[i + kAhead].row);
    RankedRow row = ranked[i];
    const JudgedRow<Rows> judged{&rows, row.key, row.row, &weights};
    row.rank = policy.Rank(judged);
    if (!remove(judged)) ranked[kept++] = row;
  }
  ranked.resize(kept);
  return ranked;
}

// Calls remove(row) for rows of the lowest rank until above() is 0. above() returns the least
// number of rows that must still be removed.
template <class Above, class Remove>
void RemoveLowest(std::vector<RankedRow> ranked, const Above& above, const Remove& remove) {
  auto first = ranked.begin();
  for (uint64_t n = above(); n > 0; n = above()) {
    const auto last = first + static_cast<ptrdiff_t>(n);
    std::nth_element(first, last - 1, ranked.end());
    for (; first != last; ++first) remove(*first);
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_RANKING_H_
