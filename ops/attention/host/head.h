// One head of one sequence: its operands in the layout of the products, and its scores, tile by
// tile.

#ifndef GMETA_OPS_ATTENTION_HOST_HEAD_H_
#define GMETA_OPS_ATTENTION_HOST_HEAD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/attention/host/multiply.h"
#include "ops/attention/host/relative_bias.h"
#include "ops/attention/host/tile.h"

namespace gmeta::hstu {

// Rows of a block of scores. Its 8 kB, with as much of k and of v, fit in the first cache.
inline constexpr int kRows = 32;
// Widths are padded to this, whatever the width of the machine's vectors.
inline constexpr int kLanes = 16;

inline int RoundUp(int x, int to) { return (x + to - 1) / to * to; }

// What the weights are: the bias alone, the SiLU of scores, or the softmax of a row's scores.
enum class Weights { kBias, kSilu, kSoftmax };

// The inputs of a call. q and k are null for attention by the bias alone.
struct Inputs {
  const float* q;
  const float* k;
  const float* v;
  int heads;
  int width;   // of q and k
  int values;  // of v
  float scale;
  float alpha;
  const Visible* visible;
  RelativeBias bias;
  // Only with softmax, (heads, tokens): the logarithms of the rows' sums, to base 2, which the
  // forward pass writes and gradients read. Null: no softmax.
  float* log_sums = nullptr;
  size_t tokens = 0;
  const float* out = nullptr;  // what the forward pass wrote; only for its gradients

  Weights weights() const {
    return q == nullptr ? Weights::kBias : log_sums == nullptr ? Weights::kSilu : Weights::kSoftmax;
  }
  // Returns the logarithm of the sum of a unit's first row.
  float* LogSums(size_t token, int head) const { return log_sums + head * tokens + token; }
};

// The place of one head of one sequence.
struct Unit {
  size_t begin;  // the sequence's first token
  int length;
  int head;
};

// Buffers that units use one after another.
struct Workspace {
  std::vector<float> rows, q, k, keys, v, values, of_rows, of_out, of_q, of_k, of_v, out, scores,
      of_scores;
  std::vector<uint8_t> buckets;
};

// Copies a head's tokens from (tokens, heads, width), times a factor. Pads rows and columns with
// zeros.
inline const float* Pack(const float* from, const Unit& unit, int heads, int width, float factor,
                         std::vector<float>* to) {
  const size_t stride = static_cast<size_t>(heads) * width, columns = RoundUp(width, kLanes);
  from += unit.begin * stride + static_cast<size_t>(unit.head) * width;
  to->assign(RoundUp(unit.length, kColumns) * columns, 0.0f);
  for (int r = 0; r < unit.length; ++r) {
    float* row = to->data() + r * columns;
    for (int c = 0; c < width; ++c) row[c] = from[r * stride + c] * factor;
  }
  return to->data();
}

// Does the same in blocks of kBlock tokens, each (width, kBlock). kBlock is kColumns for tokens
// that are columns of scores, and kRowsAtOnce for those that are rows.
template <int kBlock>
const float* PackBlocks(const float* from, const Unit& unit, int heads, int width, float factor,
                        std::vector<float>* to) {
  const size_t stride = static_cast<size_t>(heads) * width;
  from += unit.begin * stride + static_cast<size_t>(unit.head) * width;
  to->assign(static_cast<size_t>(RoundUp(unit.length, kColumns)) * width, 0.0f);
  for (int first = 0; first < unit.length; first += kBlock) {
    float* block = to->data() + static_cast<size_t>(first) * width;
    const float* rows = from + first * stride;
    const int length = std::min(kBlock, unit.length - first);
    for (int c = 0; c < width; ++c) {
      for (int r = 0; r < length; ++r) block[c * kBlock + r] = rows[r * stride + c] * factor;
    }
  }
  return to->data();
}

// The inverse: copies the head's tokens, times a factor, to (tokens, heads, width).
inline void Unpack(const float* from, const Unit& unit, int first, int rows, int heads, int width,
                   float factor, float* to) {
  const size_t stride = static_cast<size_t>(heads) * width, columns = RoundUp(width, kLanes);
  to += (unit.begin + first) * stride + static_cast<size_t>(unit.head) * width;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) to[r * stride + c] = from[r * columns + c] * factor;
  }
}

// Returns those of the columns [block, block + kColumns) that any row of a tile sees, in whole
// lanes.
inline Range SeenByTile(const Visible* visible, const Unit& unit, int row, int block) {
  const Range all{block, std::min(block + kColumns, unit.length)};
  Range found{all.end, all.begin};
  for (int i = row; i < std::min(row + kRowsAtOnce, unit.length); ++i) {
    const Range seen = Seen(visible[i], i, all);
    found = {std::min(found.begin, seen.begin), std::max(found.end, seen.end)};
  }
  if (found.empty()) return found;
  return {found.begin / kLanes * kLanes, RoundUp(found.end, kLanes)};
}

// Computes the scores of a tile of kRowsAtOnce rows: products with the keys, if there are any, plus
// the bias. It overwrites `scores`, whose rows are kColumns apart and begin with column `block`.
template <int W, bool kScored>
GMETA_ALWAYS_INLINE void Scores(const Inputs& in, const RelativeBias& bias, const Unit& unit,
                                const float* q, const float* keys, int row, int block,
                                Range columns, float* scores, uint8_t* buckets) {
  const int begin = columns.begin - block, end = columns.end - block;
  const int real = std::min(columns.end, unit.length);
  for (int i = 0; i < kRowsAtOnce; ++i) {
    float* of_row = scores + i * kColumns;
    std::fill(of_row + begin, of_row + end, 0.0f);
    if (bias.any() && row + i < unit.length) {
      AddBias(bias, row + i, columns.begin, real, of_row + begin, buckets + i * kColumns + begin);
    }
  }
  if (kScored) {
    Multiply<W>(PackedTile{q + static_cast<size_t>(row) * in.width},
                keys + static_cast<size_t>(block) * in.width + begin, kColumns, scores + begin,
                kColumns, kRowsAtOnce, end - begin, 0, in.width);
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_HEAD_H_
