// The sums of a warpgroup of dS along diagonals, for the gradient of a bias of places
// (table_sums.cuh).
//
// Along a diagonal j - i is constant. A thread has numbers of two rows and of pairs of columns, 8
// apart. Once it has added those of one diagonal, 18 of its 32 numbers are left. A warp of 16 rows
// by 64 columns has 79 diagonals. It lays the 18 out in shared memory as 8 rows of 72, with zeros
// at both sides, so that a diagonal is 8 numbers, one in each row, and its threads add them,
// without a condition. The group's four warps lie 16 rows apart: a thread adds their sums of its
// diagonal, one of 127, and adds the result to the warpgroup's slice of the table, in global
// memory. Distances at or beyond the table's ends stay with the thread. No access has bank
// conflicts.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_DIAGONAL_SUMS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_DIAGONAL_SUMS_CUH_

#include "ops/attention/gpu/bias/table_parts.cuh"
#include "ops/attention/gpu/fragments.cuh"

namespace gmeta::hstu {

// Its shared memory.
struct Diagonals {
  static constexpr int kRow = 88;  // 72 numbers between 8 zeros

  alignas(8) float of_warps[4][8][kRow];  // written in pairs
  float sums[2][4][128];                  // of each warp, of one block and of the next

  // Sets the zeros beside the diagonals. All threads of the warpgroup call it.
  __device__ __forceinline__ void Clear(int barrier) {
    float* const all = reinterpret_cast<float*>(this);
    hopper::NamedSync(barrier, 128);
    for (int i = static_cast<int>(threadIdx.x) % 128; i < static_cast<int>(sizeof(*this) / 4);
         i += 128) {
      all[i] = 0.0f;
    }
    hopper::NamedSync(barrier, 128);
  }
};

// What a thread of the warpgroup has. All its threads call all functions.
class DiagonalSums {
 public:
  // `slice` is the warpgroup's, `barrier` a named barrier of its own.
  __device__ __forceinline__ DiagonalSums(const BiasParts& parts, float* slice, int barrier)
      : slice_(slice), places_(parts.places), zero_(parts.places / 2), barrier_(barrier) {}

  // Adds dS of a block whose first column is `column`. All threads of the warpgroup call it.
  __device__ __forceinline__ void Add(Diagonals& shared, const OwnPlace& own, int column,
                                      const float (&of_scores)[32]) {
    const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    float* const row = shared.of_warps[warp][lane / 4] + 8 + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < 9; ++m) {  // columns 8 j and rows 8 i with j - i = m - 1
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // Number 4 j + 2 i + e.
        pair[e] = m == 0   ? of_scores[2 + e]
                  : m == 8 ? of_scores[28 + e]
                           : of_scores[4 * (m - 1) + e] + of_scores[4 * m + 2 + e];
      }
      *reinterpret_cast<float2*>(row + 8 * m) = make_float2(pair[0], pair[1]);
    }
    __syncwarp();
    parity_ ^= 1;
    float* const sums = shared.sums[parity_][warp];
    // Number 1 to 79 of the warp is number d + 48 - 16 warp of the group, 1 to 127.
#pragma unroll
    for (int first = 0; first < 80; first += 32) {
      const int d = first + lane;
      if (d == 0 || d > 79) continue;
      const float* const from = shared.of_warps[warp][0] + d;
      float sum = from[0];
#pragma unroll
      for (int i = 1; i < 8; ++i) sum += from[i * (Diagonals::kRow + 1)];
      sums[d + 48 - 16 * warp] = sum;
    }
    hopper::NamedSync(barrier_, 128);
    // The diagonals of neighbouring blocks overlap by a half. A thread keeps to those whose
    // distance is its own number modulo 128, so that it adds one up in a register over two blocks,
    // and that no other thread adds to the same place of the slice.
    const int shift = (column - own.row) & 127;  // 0 or 64
    const int diagonal = (thread + 64 - shift) & 127;
    if (diagonal == 0) return;
    const auto of_warp = [&](int which) { return shared.sums[parity_][which][diagonal]; };
    const int place = column - own.row + diagonal - 64 + zero_;
    if (place != place_) {
      AddToSlice();
      place_ = place, of_place_ = 0.0f;
    }
    of_place_ += (of_warp(0) + of_warp(1)) + (of_warp(2) + of_warp(3));
  }

  // Adds the thread's sum to its place; after the last block, `below` and `above` are complete. An
  // atomic addition isn't waited for, as a read would be; no other thread adds there, so sums have
  // one order.
  __device__ __forceinline__ void AddToSlice() {
    if (place_ <= 0) {
      below_ += of_place_;
    } else if (place_ >= places_ - 1) {
      above_ += of_place_;
    } else {
      atomicAdd(slice_ + place_, of_place_);
    }
  }

  __device__ __forceinline__ float below() const { return below_; }
  __device__ __forceinline__ float above() const { return above_; }

 private:
  float* const slice_;
  const int places_, zero_, barrier_;
  float below_ = 0.0f, above_ = 0.0f;  // for distances at or beyond the ends of the table
  int parity_ = 0;                     // of the block, for Diagonals::sums
  int place_ = 0;                      // where of_place_ goes
  float of_place_ = 0.0f;
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_DIAGONAL_SUMS_CUH_
