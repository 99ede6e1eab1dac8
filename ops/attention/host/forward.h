// The outputs of one head of one sequence.

#ifndef GMETA_OPS_ATTENTION_HOST_FORWARD_H_
#define GMETA_OPS_ATTENTION_HOST_FORWARD_H_

#include "ops/attention/host/head.h"

namespace gmeta::hstu {

template <int W, Weights kWeights>
GMETA_ALWAYS_INLINE void ForwardHead(const Inputs& in, const Unit& unit, float* out,
                                     Workspace* work) {
  constexpr bool kScored = kWeights != Weights::kBias;
  const Visible* visible = in.visible + unit.begin;
  const RelativeBias bias = in.bias.From(unit.begin);
  const float *q = nullptr, *keys = nullptr;
  if (kScored) {
    q = PackBlocks<kRowsAtOnce>(in.q, unit, in.heads, in.width, in.alpha, &work->rows);
    keys = PackBlocks<kColumns>(in.k, unit, in.heads, in.width, 1.0f, &work->keys);
  }
  const float* v = Pack(in.v, unit, in.heads, in.values, 1.0f, &work->v);
  const size_t width = RoundUp(in.values, kLanes);
  work->scores.resize(kRowsAtOnce * kColumns);
  work->buckets.resize(kRowsAtOnce * kColumns);
  for (int first = 0; first < unit.length; first += kRows) {
    work->out.assign(kRows * width, 0.0f);
    RowSoftmax softmax[kRows];  // unused without
    for (int block = 0; block < unit.length; block += kColumns) {
      for (int row = first; row < std::min(first + kRows, unit.length); row += kRowsAtOnce) {
        const Range columns = SeenByTile(visible, unit, row, block);
        if (columns.empty()) continue;
        float* scores = work->scores.data();
        Scores<W, kScored>(in, bias, unit, q, keys, row, block, columns, scores,
                           work->buckets.data());
        const int begin = columns.begin - block, end = columns.end - block;
        for (int i = 0; i < std::min(kRowsAtOnce, unit.length - row); ++i) {
          float* of_row = scores + i * kColumns + begin;
          if constexpr (kWeights == Weights::kSoftmax) {
            const int at = row + i - first;
            const float by = softmax[at].Weigh<W>(
                of_row, end - begin, Within(visible[row + i], unit.length), row + i, columns.begin);
            if (by != 1.0f) Multiply(work->out.data() + at * width, width, by);
          } else if (kScored) {
            Weigh<W>(of_row, end - begin, visible[row + i], row + i, columns.begin);
          } else {
            Mask<W>(of_row, end - begin, visible[row + i], row + i, columns.begin);
          }
        }
        Multiply<W>(ScoreRows{scores}, v + block * width, width,
                    work->out.data() + (row - first) * width, width, kRowsAtOnce, width, begin,
                    end);
      }
    }
    if constexpr (kWeights == Weights::kSoftmax) {
      float* const log_sums = in.LogSums(unit.begin, unit.head) + first;
      for (int at = 0; at < std::min(kRows, unit.length - first); ++at) {
        Multiply(work->out.data() + at * width, width, 1.0f / softmax[at].sum);
        log_sums[at] = softmax[at].base + std::log(softmax[at].sum);
      }
    }
    Unpack(work->out.data(), unit, first, std::min(kRows, unit.length - first), in.heads, in.values,
           in.scale, out);
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_FORWARD_H_
