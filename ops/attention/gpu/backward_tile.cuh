// What a warpgroup of the backward pass (backward.cuh) does with a block besides products: masking,
// SiLU and its derivative, loading registers and storing results.
//
// Of 64 by 64 numbers a thread holds the ones that wgmma.cuh names: own tokens r and r + 8, r = 16
// (warp) + lane / 4, and the block's tokens 8 j + 2 (lane % 4) + {0, 1}.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_TILE_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_TILE_CUH_

#include "ops/attention/gpu/backward_memory.cuh"

namespace gmeta::hstu {

__device__ __forceinline__ int OwnRow() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// Returns the thread's first token of the block.
__device__ __forceinline__ int BlockColumn() { return threadIdx.x % 4 * 2; }

// Loads the warp's 16 rows of a tile of 64 in shared memory, as the left operand of products: 4
// registers for each 16 places of the sum.
template <class P>
__device__ __forceinline__ void LoadLeft(const char* tile, uint32_t (&left)[P::kWidth / 4]) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < P::kWidth / 16; ++i) {
    const int unit = 2 * (i % 4) + lane / 16;  // unit of 16 bytes; the swizzle moves it
    const char* from = tile + i / 4 * P::kBoxBytes + row * 128 + ((unit ^ (row % 8)) * 16);
    hopper::LoadMatrices(from, left + 4 * i);
  }
}

// Replaces scores that don't count, and their products, by zeros, whose SiLU is 0.
template <class P>
__device__ __forceinline__ void MaskBlock(const BackwardArguments& in, const OwnStrip& own,
                                          const BlockHeader<P>& header, float (&scores)[32],
                                          float (&products)[P::kOfScores ? 32 : 1]) {
  const int own_row = own.row + OwnRow(), of_block = BlockColumn();
  const auto clear = [&](int at) {
    scores[at] = 0.0f;
    if constexpr (P::kOfScores) products[at] = 0.0f;
  };
  if constexpr (P::kColumns) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = i / 2 * 8 + of_block + i % 2;
      const RowView view = header.views[row];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = own_row + 8 * j;
        if (column >= view.first && (column < view.begin || column >= view.end) &&
            column != header.row + row) {
          clear(i / 2 * 4 + 2 * j + i % 2);
        }
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
        if ((seen >> (i / 2 + i % 2 * 16) & 1) == 0) clear(i / 2 * 4 + 2 * j + i % 2);
      }
    }
  }
}

// Returns SiLU'(x), given t = tanh(x / 2) and SiLU(x).
__device__ __forceinline__ float Slope(float t, float silu) {
  return fmaf(silu, fmaf(-0.5f, t, 0.5f), fmaf(0.5f, t, 0.5f));
}

// Computes P = SiLU(x) and dS = dP SiLU'(x), rounded, for x / 2 = half * scores. With h = x / 2, t
// = tanh(h) and the sigmoid g = (1 + t) / 2:  SiLU = h + h t,  SiLU' = g + SiLU (1 - g).
template <class P>
__device__ __forceinline__ void Differentiate(float half, const float* scores,
                                              const float* products,
                                              uint32_t (&rounded_scores)[P::kOfScores ? 8 : 1],
                                              uint32_t (&rounded_weights)[P::kOfWeights ? 8 : 1]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float weight[2], of_score[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float h = half * scores[2 * i + j];
      const float t = hopper::FastTanh(h);
      weight[j] = fmaf(h, t, h);
      if constexpr (P::kOfScores) {
        of_score[j] = Slope(t, weight[j]) * products[2 * i + j];
      }
    }
    if constexpr (P::kOfScores)
      rounded_scores[i] = hopper::RoundedPair<typename P::T>(of_score[0], of_score[1]);
    if constexpr (P::kOfWeights)
      rounded_weights[i] = hopper::RoundedPair<typename P::T>(weight[0], weight[1]);
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

// Before: each of four neighbouring threads q has word q of four units of 16 bytes. After: all of
// unit q.
__device__ __forceinline__ void TransposeWords(uint32_t (&words)[4]) {
#pragma unroll
  for (int by = 1; by <= 2; by *= 2) {
    const bool upper = threadIdx.x & by;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & by) continue;
      uint32_t &low = words[i], &high = words[i + by];
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, by);
      (upper ? low : high) = other;
    }
  }
}

// Writes the sums of 64 own tokens, times a factor and rounded. Four threads write 64 neighbouring
// bytes of a row. Tokens behind the sequence's end are not written.
template <class T, int kSize>
__device__ __forceinline__ void StoreSums(const float (&sums)[kSize], float factor,
                                          const OwnStrip& own, T* to, int64_t stride) {
  constexpr int kWidth = 2 * kSize;
  const int row = own.row + OwnRow();
  T* const at = to + (static_cast<int64_t>(own.token) + row) * stride +
                static_cast<int64_t>(own.head) * kWidth + threadIdx.x % 4 * 8;
#pragma unroll
  for (int of_row = 0; of_row < 2; ++of_row) {
#pragma unroll
    for (int column = 0; column < kWidth; column += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = sums + (column / 8 + i) * 4 + 2 * of_row;
        words[i] = hopper::RoundedPair<T>(factor * two[0], factor * two[1]);
      }
      TransposeWords(words);
      if (row + 8 * of_row < own.length) {
        *reinterpret_cast<uint4*>(at + 8 * of_row * stride + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_TILE_CUH_
