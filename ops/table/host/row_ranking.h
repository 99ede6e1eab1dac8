// Ranks the rows of a shard under an eviction policy (eviction.h): one walk over the index, then
// one over the records, which are asked for ahead.

#ifndef GMETA_OPS_TABLE_HOST_ROW_RANKING_H_
#define GMETA_OPS_TABLE_HOST_ROW_RANKING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/table/core/eviction.h"
#include "ops/table/core/key_index.h"

namespace gmeta {

// A row, as eviction policies see it. Rows is one of rows.h.
template <class Rows>
struct JudgedRow {
  const Rows* rows;
  int64_t key;
  uint32_t row;
  std::vector<float>* weights;  // room for a row's

  uint32_t frequency() const { return rows->header(row)->frequency; }
  uint32_t last_step() const { return rows->header(row)->last_step; }
  // In float64 and in the order of the elements, so that a model can say the same.
  double SquaredNorm() const {
    rows->CopyWeights(row, weights->data());
    double sum = 0.0;
    for (const float w : *weights) sum += static_cast<double>(w) * static_cast<double>(w);
    return sum;
  }
};

// All rows with their rank, but those that `remove` takes away: it is asked for each, and returns
// whether it did.
template <class Policy, class Rows, class Remove>
std::vector<RankedRow> RankRows(const Policy& policy, const KeyIndex& index, const Rows& rows,
                                size_t dim, const Remove& remove) {
  constexpr size_t kAhead = 16;
  std::vector<RankedRow> ranked;
  ranked.reserve(index.size());
  index.ForEach([&](int64_t key, uint32_t row) { ranked.push_back({0, key, row}); });
  std::vector<float> weights(dim);
  size_t kept = 0;
  for (size_t i = 0; i < ranked.size(); ++i) {
    if (i + kAhead < ranked.size()) rows.PrefetchHeader(ranked[i + kAhead].row);
    RankedRow row = ranked[i];
    const JudgedRow<Rows> judged{&rows, row.key, row.row, &weights};
    row.rank = policy.Rank(judged);
    if (!remove(judged)) ranked[kept++] = row;
  }
  ranked.resize(kept);
  return ranked;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_ROW_RANKING_H_
