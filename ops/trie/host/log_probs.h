// The log of a child's probability among its siblings (siblings.h), for one row, and its gradient:
//
//   y = z[digits[c]] - log sum of exp(z[digits[c']]),   d y / d z[digits[c']] = [c' = c] - p(c')
//
// over the allowed children c' of the node; other logits have no part in it. A row whose child is
// -1 has y = 0 and no gradient. If the child has no chance, its logit being minus infinity, y is
// that too; a row without any chance has no gradient.

#ifndef GMETA_OPS_TRIE_HOST_LOG_PROBS_H_
#define GMETA_OPS_TRIE_HOST_LOG_PROBS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "ops/trie/host/siblings.h"
#include "ops/trie/level.h"

namespace gmeta::trie {

// The rows of a batch: what the two functions below read of row i.
struct Rows {
  const float* logits;  // rows x codes
  const int64_t* nodes;
  const int64_t* children;
  size_t codes;
};

inline Problem ReadRow(const Level& level, const Rows& rows, size_t i, Siblings* siblings) {
  const Problem problem =
      siblings->Read(level, rows.nodes[i], rows.logits + i * rows.codes, rows.codes);
  if (problem != Problem::kNone) return problem;
  const int64_t child = rows.children[i], node = rows.nodes[i];
  if (child < level.starts[node] || child >= level.starts[node + 1]) return Problem::kChild;
  if (level.allowed != nullptr && !level.allowed[child]) return Problem::kForbidden;
  return Problem::kNone;
}

// Writes y of row i.
inline Problem LogProb(const Level& level, const Rows& rows, size_t i, Siblings* siblings,
                       float* to) {
  *to = 0.0f;
  if (rows.children[i] == -1) return Problem::kNone;
  const Problem problem = ReadRow(level, rows, i, siblings);
  if (problem != Problem::kNone) return problem;
  const size_t digit = static_cast<size_t>(level.digits[rows.children[i]]);
  *to = siblings->count() == 0 ? -std::numeric_limits<float>::infinity()
                               : siblings->log_prob_of(rows.logits[i * rows.codes + digit]);
  return Problem::kNone;
}

// Writes the gradient of row i, `of_y` being that of y.
inline Problem LogProbGradient(const Level& level, const Rows& rows, size_t i, float of_y,
                               Siblings* siblings, float* to) {
  std::fill_n(to, rows.codes, 0.0f);
  if (rows.children[i] == -1) return Problem::kNone;
  const Problem problem = ReadRow(level, rows, i, siblings);
  if (problem != Problem::kNone || siblings->count() == 0) return problem;
  const float each = of_y / siblings->sum();
  for (size_t j = 0; j < siblings->count(); ++j)
    to[siblings->digit(j)] -= each * siblings->weight(j);
  to[level.digits[rows.children[i]]] += of_y;
  return Problem::kNone;
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_LOG_PROBS_H_
