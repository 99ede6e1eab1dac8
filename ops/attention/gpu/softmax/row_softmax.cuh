// The softmax of rows that come block by block, for the forward pass (forward.cuh).
//
//   P_ij = exp(x_ij) / sum_{j in V(i)} exp(x_ij)     L_i = log2 sum_{j in V(i)} exp(x_ij)
//
// A row's greatest score is known only at its end. So weights are relative to a base m that rises
// with the scores, and what has been summed is multiplied when it rises (M. Milakov and N.
// Gimelshein, "Online normalizer calculation for softmax", 2018):
//
//   w_ij = exp(x_ij - m)     l = sum w_ij     O = sum w_ij v_j     m rises by d: l, O *= exp(-d)
//
// In the end P V = O / l, and L = m / ln 2 + log2 l is kept for the gradients, where P_ij =
// 2^(x_ij / ln 2 - L_i) takes one instruction of the special function unit and one other. With
// scores times 1 / ln 2, the powers are of 2 here too.
//
// The base needn't be the greatest score. It rises only if a score exceeds it by a factor of 256 in
// weights: no number can overflow before, and larger weights lose no precision. So, after the first
// block, a warp hardly ever multiplies O. A row decides for itself, so that its bits don't depend
// on other rows; the warp merely skips multiplications by 1.
//
// Four threads hold a row. They share its greatest score in every block, but add up l only in the
// end. A row that has seen nothing yet has the base minus infinity, and weights of 0.

#ifndef GMETA_OPS_ATTENTION_GPU_SOFTMAX_ROW_SOFTMAX_CUH_
#define GMETA_OPS_ATTENTION_GPU_SOFTMAX_ROW_SOFTMAX_CUH_

#include <cmath>

#include "ops/hopper/hopper.cuh"

namespace gmeta::hstu {

// How scores become weights.
enum class Activation { kSilu, kSoftmax };

inline constexpr float kLog2E = 1.4426950408889634f;

// The two rows of a thread, r and r + 8, in blocks of kColumns columns. Number 4 j + 2 i + e of a
// block belongs to row i (wgmma.cuh).
template <int kColumns>
class RowSoftmax {
 public:
  // Replaces the scores of a block, minus infinity where a row doesn't see a column, by weights.
  // `factor` times a score is the logarithm of its weight, to base 2.
  __device__ __forceinline__ void Weigh(float factor, float (&scores)[kColumns / 2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float greatest[2] = {base_[row], base_[row]};  // of even and of odd numbers: two short chains
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        greatest[i % 2] = fmaxf(greatest[i % 2], scores[Number(row, i)]);
      }
      const float found = OfFour(fmaxf(greatest[0], greatest[1]),
                                 [](float one, float other) { return fmaxf(one, other); });
      const bool rises = factor * (found - base_[row]) > kRise;
      by_[row] = rises ? hopper::FastExp2(factor * (base_[row] - found)) : 1.0f;
      base_[row] = rises ? found : base_[row];
      // Minus infinity minus itself would be NaN.
      const float base = base_[row] == -INFINITY ? 0.0f : factor * base_[row];
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& score = scores[Number(row, i)];
        score = hopper::FastExp2(fmaf(factor, score, -base));
        sums[i % 2] += score;
      }
      sums_[row] = fmaf(sums_[row], by_[row], sums[0] + sums[1]);
    }
  }

  // Multiplies sums over the blocks before the last that was weighed. All lanes call it.
  template <int kSize>
  __device__ __forceinline__ void Rescale(float (&out)[kSize]) const {
    if (__all_sync(kAll, static_cast<int>(by_[0] == 1.0f && by_[1] == 1.0f))) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) out[i] *= by_[i / 2 % 2];
  }

  // Adds up the weights of both rows, after the last block. All lanes call it.
  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (float& sum : sums_) sum = OfFour(sum, [](float one, float other) { return one + other; });
  }
  // Returns `scale` / l of both rows, by which to multiply their sums; 0 of a row that has seen
  // nothing.
  __device__ __forceinline__ float2 Factors(float scale) const {
    const auto of_row = [&](float sum) {
      return sum == 0.0f ? 0.0f : scale * hopper::FastReciprocal(sum);
    };
    return make_float2(of_row(sums_[0]), of_row(sums_[1]));
  }
  // Returns L of both rows; 0 of a row that has seen nothing.
  __device__ __forceinline__ float2 LogSums(float factor) const {
    const auto of_row = [&](int row) {
      return sums_[row] == 0.0f ? 0.0f : fmaf(factor, base_[row], hopper::FastLog2(sums_[row]));
    };
    return make_float2(of_row(0), of_row(1));
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFu;
  static constexpr float kRise = 8.0f;

  static __device__ __forceinline__ constexpr int Number(int row, int i) {
    return i / 2 * 4 + 2 * row + i % 2;
  }

  // Combines a number of the four threads that hold a row.
  template <class Combine>
  static __device__ __forceinline__ float OfFour(float x, const Combine& combine) {
    x = combine(x, __shfl_xor_sync(kAll, x, 1));
    return combine(x, __shfl_xor_sync(kAll, x, 2));
  }

  float base_[2] = {-INFINITY, -INFINITY};
  float by_[2] = {1.0f, 1.0f};
  float sums_[2] = {0.0f, 0.0f};  // of this thread's weights
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_SOFTMAX_ROW_SOFTMAX_CUH_
