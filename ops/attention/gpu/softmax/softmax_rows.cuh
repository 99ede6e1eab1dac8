// What the gradients of a softmax need of rows (backward.cuh): L_i and D_i, and what a row sees.
//
//   P_ij = 2^(x_ij / ln 2 - L_i)     dx_ij = P_ij (dP_ij - D_i)
//
// Where own tokens are rows, a thread keeps the numbers of its two rows in registers. Where they
// are columns, rows come in blocks, and a thread meets 16 of a block's 64 rows: the warp that
// requests copies fetches their numbers ahead, and writes them to the block's header.
//
// The tiles fill the shared memory to the last kilobyte. So these numbers take the place of the
// rows' views (strips.cuh), 12 bytes a row, and these become narrow: of a view only the tile's 128
// columns matter, where its three bounds are bytes.

#ifndef GMETA_OPS_ATTENTION_GPU_SOFTMAX_SOFTMAX_ROWS_CUH_
#define GMETA_OPS_ATTENTION_GPU_SOFTMAX_SOFTMAX_ROWS_CUH_

#include <cstdint>

#include "ops/attention/gpu/plan/strips.cuh"
#include "ops/attention/gpu/softmax/row_softmax.cuh"

namespace gmeta::hstu {

struct RowNumbers {
  float log_sum;  // L
  float product;  // D
};

// L and D of all rows, (heads, tokens).
struct RowTables {
  const float* log_sums;
  const float* products;
  int64_t tokens;

  // Returns those of the row at place `row` of a sequence; 0 for places past its end.
  __device__ __forceinline__ RowNumbers Of(int head, int token, int row, int length) const {
    if (row >= length) return {0.0f, 0.0f};
    const int64_t at = head * tokens + token + row;
    return {__ldg(log_sums + at), __ldg(products + at)};
  }
};

// What a row sees of a tile of columns, besides itself.
struct NarrowView {
  uint32_t bytes;  // `first`, `begin` and `end` - `begin` of a RowView, within the tile

  static __device__ __forceinline__ NarrowView Of(const RowView& view, int tile_column) {
    const auto within = [&](int column) {
      return static_cast<uint32_t>(min(max(column - tile_column, 0), kTileRows));
    };
    const uint32_t begin = within(view.begin), end = max(within(view.end), begin);
    return {within(view.first) | begin << 8 | (end - begin) << 16};
  }
  __device__ __forceinline__ bool Sees(uint32_t column) const {
    return static_cast<int>(column < (bytes & 0xFF)) |
           static_cast<int>(column - (bytes >> 8 & 0xFF) < bytes >> 16);
  }
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_SOFTMAX_SOFTMAX_ROWS_CUH_
