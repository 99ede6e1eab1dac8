// Products of small matrices that lie in the cache: C += A B.
//
// A tile of C of kRows rows and kVectors vectors stays in registers while the sum runs over k. Each
// step loads kVectors vectors of B and broadcasts kRows numbers of A for kRows * kVectors fused
// multiplications, so the multipliers and not the loads set the pace. A is read through two
// strides, so a transposed A costs nothing. The rows of B and C are a whole number of vectors wide;
// C has a whole number of tiles of rows. Callers pad with zeros for that.

#ifndef GMETA_OPS_ATTENTION_HOST_MULTIPLY_H_
#define GMETA_OPS_ATTENTION_HOST_MULTIPLY_H_

#include <cstddef>

#include "ops/attention/host/vector.h"

namespace gmeta::hstu {

// The rows of a tile. 32 registers allow twice as many rows as 16 do.
template <int W>
inline constexpr int kTileRows = W == 16 ? 8 : 4;
// The number of rows is padded to a multiple of this, for all widths of vectors.
inline constexpr int kRowsAtOnce = 8;
// The distance between rows of scores, and the number of columns of a block.
inline constexpr int kColumns = 64;

// A matrix whose element (r, k) is data[r * kRow + k * kColumn]. The strides are constants, so the
// numbers that a step broadcasts are at fixed distances from one pointer.
template <size_t kRow, size_t kColumn>
struct Strided {
  const float* data;
  static constexpr size_t row = kRow, column = kColumn;
};
// Rows of scores, columns of scores, and rows packed by `PackBlocks<kRowsAtOnce>`.
using ScoreRows = Strided<kColumns, 1>;
using ScoreColumns = Strided<1, kColumns>;
using PackedTile = Strided<1, kRowsAtOnce>;

template <int W, int kVectors, class A>
GMETA_ALWAYS_INLINE void MultiplyTile(A a, const float* b, size_t b_row, float* c, size_t c_row,
                                      int begin, int end) {
  constexpr int kRows = kTileRows<W>;
  Floats<W> sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Load<W>(c + r * c_row + v * W);
  }
  const float* of_a = a.data + begin * A::column;
  const float* of_b = b + begin * b_row;
  for (int k = begin; k < end; ++k, of_a += A::column, of_b += b_row) {
    Floats<W> x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = Load<W>(of_b + v * W);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sum[r][v] += of_a[r * A::row] * x[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) Store<W>(c + r * c_row + v * W, sum[r][v]);
  }
}

// C (rows, columns) += A (rows, [begin, end)) B ([begin, end), columns).
template <int W, class A>
GMETA_ALWAYS_INLINE void Multiply(A a, const float* b, size_t b_row, float* c, size_t c_row,
                                  int rows, int columns, int begin, int end) {
  for (int r = 0; r < rows; r += kTileRows<W>) {
    const A of_rows{a.data + r * A::row};
    float* to = c + r * c_row;
    int n = 0;
    for (; n + 2 * W <= columns; n += 2 * W) {
      MultiplyTile<W, 2>(of_rows, b + n, b_row, to + n, c_row, begin, end);
    }
    if (n < columns) MultiplyTile<W, 1>(of_rows, b + n, b_row, to + n, c_row, begin, end);
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_MULTIPLY_H_
