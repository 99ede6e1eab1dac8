// What a warpgroup of the backward pass (backward.cuh) does with a block besides products: masking,
// SiLU or softmax and its derivative, loading registers and storing results.
//
// Of 64 by 64 numbers a thread holds the ones that wgmma.cuh names: own tokens r and r + 8, r = 16
// (warp) + lane / 4, and the block's tokens 8 j + 2 (lane % 4) + {0, 1}.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_TILE_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_TILE_CUH_

#include "ops/attention/gpu/backward/memory.cuh"
#include "ops/attention/gpu/fragments.cuh"

namespace gmeta::hstu {

// Returns the thread's first token of the block.
__device__ __forceinline__ int BlockColumn() { return threadIdx.x % 4 * 2; }

// Returns whether a row sees a column of the tile, besides itself. The warpgroup's first own column
// is `first`.
__device__ __forceinline__ bool SeesColumn(const RowView& view, int /*first*/, int column) {
  const auto since = static_cast<unsigned>(max(view.end - view.begin, 0));
  return static_cast<int>(column < view.first) |
         static_cast<int>(static_cast<unsigned>(column - view.begin) < since);
}
__device__ __forceinline__ bool SeesColumn(const NarrowView& view, int first, int column) {
  return view.Sees(static_cast<uint32_t>(column - first) + (threadIdx.x / 128 - 1) * kStripRows);
}

// Replaces scores that don't count by numbers whose weights are 0, and their products by zeros.
template <class P>
__device__ __forceinline__ void MaskBlock(const BackwardArguments& in, const OwnStrip& own,
                                          const BlockHeader<P>& header, float (&scores)[32],
                                          float (&products)[P::kOfScores ? 32 : 1]) {
  const int own_row = own.row + OwnRow(), of_block = BlockColumn();
  const auto keep = [&](int at, bool seen) {
    scores[at] = seen ? scores[at] : P::kSoftmax ? -INFINITY : 0.0f;
    if constexpr (P::kOfScores) products[at] = seen ? products[at] : 0.0f;
  };
  if constexpr (P::kColumns) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = i / 2 * 8 + of_block + i % 2;
      const auto view = header.views[row];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = own_row + 8 * j;
        const bool seen = static_cast<int>(SeesColumn(view, own.row, column)) |
                          static_cast<int>(column == header.row + row);
        keep(i / 2 * 4 + 2 * j + i % 2, seen);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = own_row + 8 * j;
      uint32_t seen = 0;
      if (row < own.length) {
        const RowView view =
            reinterpret_cast<const RowView*>(in.visible)[static_cast<int64_t>(own.token) + row];
        seen = view.Seen<kStripRows>(row, header.row + of_block);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        keep(i / 2 * 4 + 2 * j + i % 2, seen >> (i / 2 + i % 2 * 16) & 1);
      }
    }
  }
}

// Returns SiLU'(x), given t = tanh(x / 2) and SiLU(x).
__device__ __forceinline__ float Slope(float t, float silu) {
  return fmaf(silu, fmaf(-0.5f, t, 0.5f), fmaf(0.5f, t, 0.5f));
}

// Computes P = SiLU(x) and dS = dP SiLU'(x), rounded, for x / 2 = half * scores. With h = x / 2, t
// = tanh(h) and the sigmoid g = (1 + t) / 2:  SiLU = h + h t,  SiLU' = g + SiLU (1 - g). With
// kOfBias, dS takes the place of the products, too.
template <class P>
__device__ __forceinline__ void Differentiate(float half, const float* scores, float* products,
                                              uint32_t (&rounded_scores)[P::kOfScores ? 8 : 1],
                                              uint32_t (&rounded_weights)[P::kOfWeights ? 8 : 1]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float weight[2], of_score[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (!P::kScored) {
        weight[j] = scores[2 * i + j];
        continue;
      }
      const float h = half * scores[2 * i + j];
      const float t = hopper::FastTanh(h);
      weight[j] = fmaf(h, t, h);
      if constexpr (P::kOfScores) {
        of_score[j] = Slope(t, weight[j]) * products[2 * i + j];
        if constexpr (P::kOfBias) products[2 * i + j] = of_score[j];
      }
    }
    if constexpr (P::kOfScores)
      rounded_scores[i] = hopper::RoundedPair<typename P::T>(of_score[0], of_score[1]);
    if constexpr (P::kOfWeights)
      rounded_weights[i] = hopper::RoundedPair<typename P::T>(weight[0], weight[1]);
  }
}

// Computes P = exp(x - L) and dS = P (dP - D), rounded, of half of a block's numbers. factor *
// scores is x / ln 2, and L is to base 2. `own` are the thread's two rows, if own tokens are rows.
// With kOfBias, dS takes the place of the products, too.
template <class P>
__device__ __forceinline__ void DifferentiateSoftmax(
    float factor, const BlockHeader<P>& header, const RowNumbers (&own)[2], int half,
    const float* scores, float* products, uint32_t (&rounded_scores)[P::kOfScores ? 8 : 1],
    uint32_t (&rounded_weights)[P::kOfWeights ? 8 : 1]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // of the block's tokens
    float4 of_pair{};
    if constexpr (P::kColumns) {
      const RowNumbers* const rows = header.rows + 8 * (4 * half + pair) + BlockColumn();
      of_pair = *reinterpret_cast<const float4*>(rows);
    }
#pragma unroll
    for (int i = 2 * pair; i < 2 * pair + 2; ++i) {
      float weight[2], of_score[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const RowNumbers row = !P::kColumns ? own[i % 2]
                               : j == 0     ? RowNumbers{of_pair.x, of_pair.y}
                                            : RowNumbers{of_pair.z, of_pair.w};
        weight[j] = hopper::FastExp2(fmaf(factor, scores[2 * i + j], -row.log_sum));
        if constexpr (P::kOfScores) {
          of_score[j] = weight[j] * (products[2 * i + j] - row.product);
          if constexpr (P::kOfBias) products[2 * i + j] = of_score[j];
        }
      }
      if constexpr (P::kOfScores)
        rounded_scores[i] = hopper::RoundedPair<typename P::T>(of_score[0], of_score[1]);
      if constexpr (P::kOfWeights)
        rounded_weights[i] = hopper::RoundedPair<typename P::T>(weight[0], weight[1]);
    }
  }
}

// Sets the rows of a tile from `row` on to zero. All threads of a warpgroup call it.
template <class P>
__device__ __forceinline__ void ZeroRows(char* tile, int row) {
#pragma unroll
  for (int box = 0; box < P::kBoxes; ++box) {
    for (int at = row * 128 + threadIdx.x % 128 * 16; at < P::kBoxBytes; at += 128 * 16) {
      *reinterpret_cast<uint4*>(tile + box * P::kBoxBytes + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_TILE_CUH_
