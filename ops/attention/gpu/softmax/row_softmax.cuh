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
// block, a warp hardly ever has to multiply O, or even to learn what the greatest score of a row
// is: four threads hold a row, and none of them must have seen a score far above the base. If one
// has, each row decides for itself, so that its bits don't depend on other rows.
//
// The four threads add up l only in the end. A row that has seen nothing yet has the base minus
// infinity, and weights of 0.

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
  // `factor` times a score is the logarithm of its weight, to base 2. All lanes call it.
  __device__ __forceinline__ void Weigh(float factor, float (&scores)[kColumns / 2]) {
    float greatest[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float of[2] = {scores[Number(row, 0)], scores[Number(row, 1)]};  // two short chains
#pragma unroll
      for (int i = 2; i < kColumns / 4; ++i) of[i % 2] = fmaxf(of[i % 2], scores[Number(row, i)]);
      greatest[row] = fmaxf(of[0], of[1]);
    }
    const bool rises = Rises(factor, 0, greatest[0]) || Rises(factor, 1, greatest[1]);
    rose_ = __any_sync(kAll, static_cast<int>(rises)) != 0;
    if (rose_) Rise(factor, greatest);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& score = scores[Number(row, i)];
        score = hopper::FastExp2(fmaf(factor, score, -log_base_[row]));
        sums[i % 2] += score;
      }
      sums_[row] += sums[0] + sums[1];
    }
  }

  // Multiplies sums over the blocks before the last that was weighed, if bases rose.
  template <int kSize>
  __device__ __forceinline__ void Rescale(float (&out)[kSize]) const {
    if (!rose_) return;
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
  __device__ __forceinline__ float2 LogSums() const {
    const auto of_row = [&](int row) {
      return sums_[row] == 0.0f ? 0.0f : log_base_[row] + hopper::FastLog2(sums_[row]);
    };
    return make_float2(of_row(0), of_row(1));
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFu;
  static constexpr float kRise = 8.0f;

  static __device__ __forceinline__ constexpr int Number(int row, int i) {
    return i / 2 * 4 + 2 * row + i % 2;
  }

  __device__ __forceinline__ bool Rises(float factor, int row, float greatest) const {
    return factor * (greatest - base_[row]) > kRise;
  }

  // Raises the bases of rows whose greatest score is far above, given those of the thread's scores.
  __device__ __forceinline__ void Rise(float factor, const float (&greatest)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float found =
          OfFour(greatest[row], [](float one, float other) { return fmaxf(one, other); });
      const bool rises = Rises(factor, row, found);
      by_[row] = rises ? hopper::FastExp2(factor * (base_[row] - found)) : 1.0f;
      sums_[row] *= by_[row];
      if (rises) base_[row] = found, log_base_[row] = factor * found;
    }
  }

  // Combines a number of the four threads that hold a row.
  template <class Combine>
  static __device__ __forceinline__ float OfFour(float x, const Combine& combine) {
    x = combine(x, __shfl_xor_sync(kAll, x, 1));
    return combine(x, __shfl_xor_sync(kAll, x, 2));
  }

  float base_[2] = {-INFINITY, -INFINITY};
  float log_base_[2] = {0.0f, 0.0f};  // factor times the base; 0 if the row has seen nothing
  float by_[2];                       // what the last block that raised bases multiplied
  bool rose_;                         // whether the last block raised any base of the warp's rows
  float sums_[2] = {0.0f, 0.0f};      // of this thread's weights
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_SOFTMAX_ROW_SOFTMAX_CUH_
