// The positions of a batch, grouped by the row that they refer to. With them, rows of positions
// (gradients) are summed back to distinct rows, in a fixed order.
//
// `inverse` is sorted stably with the positions as values, so that the positions of row j are
// positions[starts[j]] ... positions[starts[j + 1] - 1], ascending. A segment is always summed in
// that order, so the sum is the same to the last bit in every run, and on the CPU.
//
// A key that occurs 50,000 times in a batch would keep a few lanes busy long after all others are
// done. So segments longer than kPiece are cut into pieces of kPiece. A kernel of their own sums
// all pieces first, at once; then the sums of the pieces are added in their order.

#ifndef GMETA_OPS_UNIQUE_GPU_SEGMENTS_CUH_
#define GMETA_OPS_UNIQUE_GPU_SEGMENTS_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace gmeta {

inline constexpr int32_t kPiece = 256;

// The kernels' view of segments.
struct SegmentsView {
  const int32_t* starts;     // (u + 1,)
  const int32_t* positions;  // (n,)
  const int32_t* pieces;     // (u,) index of a long segment's first sum in piece_sums
  const float* piece_sums;

  // Returns vector c of the sum of segment j, which has `count` positions, more than kPiece. Rows
  // have `vectors` vectors.
  template <class Vec>
  __device__ Vec SumPieces(uint32_t j, int32_t count, uint32_t vectors, uint32_t c) const;
  // Returns vector c of the row at a place among the sorted positions.
  template <class Vec>
  __device__ Vec Row(const float* values, int32_t place, uint32_t vectors, uint32_t c) const;
};

__device__ inline float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Returns sum + row(first) + ... + row(count - 1), added in this order; loads four rows at a time.
template <class Vec, class Row>
__device__ Vec AddInOrder(Vec sum, int32_t first, int32_t count, const Row& row) {
  constexpr int32_t kAhead = 4;
  int32_t i = first;
  for (; i + kAhead <= count; i += kAhead) {
    Vec next[kAhead];
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) next[k] = row(i + k);
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) sum = sum + next[k];
  }
  for (; i < count; ++i) sum = sum + row(i);
  return sum;
}

template <class Vec, class Row>
__device__ Vec SumInOrder(int32_t count, const Row& row) {
  return count == 0 ? Vec{} : AddInOrder<Vec>(row(0), 1, count, row);
}

template <class Vec>
__device__ Vec SegmentsView::SumPieces(uint32_t j, int32_t count, uint32_t vectors,
                                       uint32_t c) const {
  const Vec* sums = reinterpret_cast<const Vec*>(piece_sums);
  const int32_t first = __ldg(pieces + j);
  return SumInOrder<Vec>((count + kPiece - 1) / kPiece, [&](int32_t i) {
    return __ldcg(sums + static_cast<size_t>(first + i) * vectors + c);
  });
}

template <class Vec>
__device__ Vec SegmentsView::Row(const float* values, int32_t place, uint32_t vectors,
                                 uint32_t c) const {
  return __ldcs(reinterpret_cast<const Vec*>(values) +
                static_cast<size_t>(__ldg(positions + place)) * vectors + c);
}

// Returns the bytes of scratch for n positions, at most u rows, and values of `dim` floats.
size_t SegmentsBytes(int64_t n, int64_t u, int64_t dim);

// Sorts the positions and sums the pieces of long segments. u is the number of rows. If `count` is
// given, u is the largest possible number, and *count in device memory is the actual one.
SegmentsView MakeSegments(const float* values, int64_t dim, const int32_t* inverse, int64_t n,
                          int64_t u, const int32_t* count, void* workspace, cudaStream_t stream);

// Computes out (u, dim), the sums of all segments; `count` is as above.
void SumSegments(const float* values, int64_t dim, const SegmentsView& segments, int64_t u,
                 const int32_t* count, float* out, cudaStream_t stream);

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_GPU_SEGMENTS_CUH_
