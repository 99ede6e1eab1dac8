// The gradients of one head of one sequence. With P = SiLU(S) and G = s dO:
//
//   dV = P^T G    dS = G V^T * SiLU'(S)    dQ = alpha dS K    dK = dS^T (alpha Q)    drab = dS
//
// With softmax, P = exp(S - log sum) and dS = P * (G V^T - dO O).

#ifndef GMETA_OPS_ATTENTION_HOST_BACKWARD_H_
#define GMETA_OPS_ATTENTION_HOST_BACKWARD_H_

#include "ops/attention/host/head.h"

namespace gmeta::hstu {

// The gradients of q, k and v. Those of q and k are null for attention by the bias alone.
struct Gradients {
  float* q;
  float* k;
  float* v;
};

// Returns the product of the output and its gradient of a row.
inline float OutputProduct(const Inputs& in, const float* of_out, const Unit& unit, int row) {
  const size_t at = ((unit.begin + row) * in.heads + unit.head) * in.values;
  float sum = 0.0f;
  for (int i = 0; i < in.values; ++i) sum += of_out[at + i] * in.out[at + i];
  return sum;
}

template <int W, Weights kWeights>
GMETA_ALWAYS_INLINE void BackwardHead(const Inputs& in, const float* of_out, const Unit& unit,
                                      const Gradients& gradients, BiasGradient* of_bias,
                                      Workspace* work) {
  constexpr bool kScored = kWeights != Weights::kBias;
  const Visible* visible = in.visible + unit.begin;
  const RelativeBias bias = in.bias.From(unit.begin);
  const size_t padded = RoundUp(in.width, kLanes), width = RoundUp(in.values, kLanes);
  const size_t tokens = RoundUp(unit.length, kColumns);
  const float *rows_of_q = nullptr, *q = nullptr, *k = nullptr, *keys = nullptr;
  if (kScored) {
    rows_of_q = PackBlocks<kRowsAtOnce>(in.q, unit, in.heads, in.width, in.alpha, &work->rows);
    q = Pack(in.q, unit, in.heads, in.width, in.alpha, &work->q);
    k = Pack(in.k, unit, in.heads, in.width, 1.0f, &work->k);
    keys = PackBlocks<kColumns>(in.k, unit, in.heads, in.width, 1.0f, &work->keys);
    work->of_k.assign(tokens * padded, 0.0f);
  }
  const float* values = PackBlocks<kColumns>(in.v, unit, in.heads, in.values, 1.0f, &work->values);
  const float* of_tiles =
      PackBlocks<kRowsAtOnce>(of_out, unit, in.heads, in.values, in.scale, &work->of_rows);
  const float* of_rows = Pack(of_out, unit, in.heads, in.values, in.scale, &work->of_out);
  work->of_v.assign(tokens * width, 0.0f);
  work->scores.resize(kRows * kColumns);
  work->of_scores.resize(kRows * kColumns);
  work->buckets.resize(kRows * kColumns);
  for (int first = 0; first < unit.length; first += kRows) {
    float log_sums[kRows], products[kRows];  // unused without softmax
    if constexpr (kWeights == Weights::kSoftmax) {
      for (int at = 0; at < std::min(kRows, unit.length - first); ++at) {
        log_sums[at] = in.LogSums(unit.begin, unit.head)[first + at];
        products[at] = OutputProduct(in, of_out, unit, first + at);
      }
    }
    if (kScored) work->of_q.assign(kRows * padded, 0.0f);
    for (int block = 0; block < unit.length; block += kColumns) {
      Range seen{unit.length, 0};
      // Tiles that see nothing of the block, and padding, count as zeros in the sums below.
      std::fill(work->scores.begin(), work->scores.end(), 0.0f);
      std::fill(work->of_scores.begin(), work->of_scores.end(), 0.0f);
      for (int row = first; row < std::min(first + kRows, unit.length); row += kRowsAtOnce) {
        const Range columns = SeenByTile(visible, unit, row, block);
        if (columns.empty()) continue;
        seen = {std::min(seen.begin, columns.begin), std::max(seen.end, columns.end)};
        const int begin = columns.begin - block, end = columns.end - block,
                  at = (row - first) * kColumns;
        float* scores = work->scores.data() + at;
        float* of_scores = work->of_scores.data() + at;
        uint8_t* buckets = work->buckets.data() + at;
        Scores<W, kScored>(in, bias, unit, rows_of_q, keys, row, block, columns, scores, buckets);
        Multiply<W>(PackedTile{of_tiles + static_cast<size_t>(row) * in.values},
                    values + static_cast<size_t>(block) * in.values + begin, kColumns,
                    of_scores + begin, kColumns, kRowsAtOnce, end - begin, 0, in.values);
        for (int i = 0; i < std::min(kRowsAtOnce, unit.length - row); ++i) {
          float *of_row = of_scores + i * kColumns + begin,
                *weights = scores + i * kColumns + begin;
          if constexpr (kWeights == Weights::kSoftmax) {
            WeighBackSoftmax<W>(weights, of_row, end - begin, Within(visible[row + i], unit.length),
                                row + i, columns.begin, log_sums[row + i - first],
                                products[row + i - first]);
          } else if (kScored) {
            WeighBack<W>(weights, of_row, end - begin, visible[row + i], row + i, columns.begin);
          } else {
            Mask<W>(weights, end - begin, visible[row + i], row + i, columns.begin);
            Mask<W>(of_row, end - begin, visible[row + i], row + i, columns.begin);
          }
          if (bias.any()) {
            AddBiasGradient(bias, row + i, columns.begin, std::min(columns.end, unit.length),
                            of_row, buckets + i * kColumns + begin, of_bias);
          }
        }
        if (kScored) {
          Multiply<W>(ScoreRows{of_scores}, k + block * padded, padded,
                      work->of_q.data() + (row - first) * padded, padded, kRowsAtOnce, padded,
                      begin, end);
        }
      }
      if (seen.empty()) continue;
      const int begin = seen.begin - block, rows = std::min(kRows, unit.length - first);
      Multiply<W>(ScoreColumns{work->scores.data() + begin}, of_rows + first * width, width,
                  work->of_v.data() + seen.begin * width, width, seen.end - seen.begin, width, 0,
                  rows);
      if (kScored) {
        Multiply<W>(ScoreColumns{work->of_scores.data() + begin}, q + first * padded, padded,
                    work->of_k.data() + seen.begin * padded, padded, seen.end - seen.begin, padded,
                    0, rows);
      }
    }
    if (kScored) {
      Unpack(work->of_q.data(), unit, first, std::min(kRows, unit.length - first), in.heads,
             in.width, in.alpha, gradients.q);
    }
  }
  Unpack(work->of_v.data(), unit, 0, unit.length, in.heads, in.values, 1.0f, gradients.v);
  if (kScored)
    Unpack(work->of_k.data(), unit, 0, unit.length, in.heads, in.width, 1.0f, gradients.k);
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_BACKWARD_H_
