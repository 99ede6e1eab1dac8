// A tile of scores: which of them count, and how they become weights.

#ifndef GMETA_OPS_ATTENTION_HOST_TILE_H_
#define GMETA_OPS_ATTENTION_HOST_TILE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/attention/host/vector.h"

namespace gmeta::hstu {

// What a token sees besides itself: the places [0, first) and [begin, end) of its sequence.
struct Visible {
  int32_t first;
  int32_t begin;
  int32_t end;
};

// A range of places.
struct Range {
  int begin;
  int end;
  bool empty() const { return begin >= end; }
};

// Returns the range of those columns that a row sees, from the first to the last.
inline Range Seen(const Visible& visible, int row, Range columns) {
  Range found{columns.end, columns.begin};
  const auto add = [&](int begin, int end) {
    begin = std::max(begin, columns.begin), end = std::min(end, columns.end);
    if (begin < end) found = {std::min(found.begin, begin), std::max(found.end, end)};
  };
  add(0, visible.first);
  add(visible.begin, visible.end);
  add(row, row + 1);
  return found;
}

// Returns whether a row sees all of the columns.
inline bool SeesAll(const Visible& visible, Range columns) {
  return columns.end <= visible.first ||
         (columns.begin >= visible.begin && columns.end <= visible.end);
}

// Keeps x for the columns that a row sees, and returns `other` for the others.
template <int W>
GMETA_ALWAYS_INLINE Floats<W> Masked(Floats<W> x, const Visible& visible, int row, int column,
                                     Floats<W> other = Floats<W>{}) {
  const Integers<W> at = Count<W>(column);
  const Integers<W> seen =
      (at < visible.first) | ((at >= visible.begin) & (at < visible.end)) | (at == row);
  return seen ? x : other;
}

// Replaces `width` scores of a row by their SiLU, masked. `width` is a whole number of vectors.
template <int W>
GMETA_ALWAYS_INLINE void Weigh(float* scores, int width, const Visible& visible, int row,
                               int column) {
  const bool all = SeesAll(visible, {column, column + width});
  for (int c = 0; c < width; c += W) {
    const Floats<W> x = Load<W>(scores + c);
    const Floats<W> weight = x * Sigmoid<W>(x);
    Store<W>(scores + c, all ? weight : Masked<W>(weight, visible, row, column + c));
  }
}

// Does the same, and turns `of_weights`, the gradients of the weights, into those of the scores:
// SiLU'(x) = sigmoid(x) (1 + x (1 - sigmoid(x))).
template <int W>
GMETA_ALWAYS_INLINE void WeighBack(float* scores, float* of_weights, int width,
                                   const Visible& visible, int row, int column) {
  const bool all = SeesAll(visible, {column, column + width});
  for (int c = 0; c < width; c += W) {
    const Floats<W> x = Load<W>(scores + c);
    const Floats<W> sigmoid = Sigmoid<W>(x);
    const Floats<W> weight = x * sigmoid;
    const Floats<W> of_score = Load<W>(of_weights + c) * (sigmoid + weight * (1.0f - sigmoid));
    Store<W>(scores + c, all ? weight : Masked<W>(weight, visible, row, column + c));
    Store<W>(of_weights + c, all ? of_score : Masked<W>(of_score, visible, row, column + c));
  }
}

// Returns what a row sees of its sequence's `length` tokens. Padding, whose SiLU is 0, must not
// enter the sum of a softmax.
inline Visible Within(const Visible& visible, int length) {
  return {std::min(visible.first, length), std::min(visible.begin, length),
          std::min(visible.end, length)};
}

// The softmax of a row, block by block: `base` is its greatest score so far, and weights are
// relative to it (row_softmax.cuh has the equations).
struct RowSoftmax {
  float base = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;

  // Replaces `width` scores by weights, masked. Returns by what to multiply sums over the blocks
  // before.
  template <int W>
  GMETA_ALWAYS_INLINE float Weigh(float* scores, int width, const Visible& visible, int row,
                                  int column) {
    const bool all = SeesAll(visible, {column, column + width});
    const Floats<W> none = Broadcast<W>(-std::numeric_limits<float>::infinity());
    Floats<W> greatest = Broadcast<W>(base);
    for (int c = 0; c < width; c += W) {
      Floats<W> x = Load<W>(scores + c);
      if (!all) x = Masked<W>(x, visible, row, column + c, none);
      greatest = x > greatest ? x : greatest;
    }
    float found = base;
    for (int lane = 0; lane < W; ++lane) found = std::max(found, greatest[lane]);
    const float by = found == base ? 1.0f : std::exp(base - found);
    // A row that has seen nothing above minus infinity has no base yet.
    const float from = std::isinf(found) && found < 0.0f ? 0.0f : found;
    Floats<W> sums{};
    for (int c = 0; c < width; c += W) {
      const Floats<W> weight = Exp<W>(Load<W>(scores + c) - from);
      const Floats<W> seen = all ? weight : Masked<W>(weight, visible, row, column + c);
      sums += seen;
      Store<W>(scores + c, seen);
    }
    base = found, sum *= by;
    for (int lane = 0; lane < W; ++lane) sum += sums[lane];
    return by;
  }
};

// Does what WeighBack does, for softmax: `log_sum` is the natural logarithm of the row's sum,
// `product` that of its output and the output's gradient.
template <int W>
GMETA_ALWAYS_INLINE void WeighBackSoftmax(float* scores, float* of_weights, int width,
                                          const Visible& visible, int row, int column,
                                          float log_sum, float product) {
  const bool all = SeesAll(visible, {column, column + width});
  for (int c = 0; c < width; c += W) {
    const Floats<W> none{}, x = Load<W>(scores + c) - log_sum;
    const Floats<W> weight = Exp<W>(x < none ? x : none);  // at most 1, however x was rounded
    const Floats<W> of_score = weight * (Load<W>(of_weights + c) - product);
    Store<W>(scores + c, all ? weight : Masked<W>(weight, visible, row, column + c));
    Store<W>(of_weights + c, all ? of_score : Masked<W>(of_score, visible, row, column + c));
  }
}

// Masks a row without an activation, for attention by the bias alone.
template <int W>
GMETA_ALWAYS_INLINE void Mask(float* x, int width, const Visible& visible, int row, int column) {
  if (SeesAll(visible, {column, column + width})) return;
  for (int c = 0; c < width; c += W) {
    Store<W>(x + c, Masked<W>(Load<W>(x + c), visible, row, column + c));
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_TILE_H_
