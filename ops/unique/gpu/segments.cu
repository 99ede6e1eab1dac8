#include <cub/device/device_radix_sort.cuh>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/unique/gpu/segments.cuh"
#include "ops/unique/gpu/unique_abi.h"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

constexpr uint32_t kThreads = 256;

struct Piece {
  int32_t start;  // place among the sorted positions
  int32_t count;
};

__global__ void Number(int32_t* numbers, uint32_t n) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) numbers[i] = static_cast<int32_t>(i);
}

// Finds starts[j], where row j begins among the sorted rows. A row that doesn't occur is empty.
__global__ void FindStarts(const int32_t* sorted, uint32_t n, uint32_t most, const int32_t* count,
                           int32_t* starts) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i > n) return;
  const int32_t u = count == nullptr ? static_cast<int32_t>(most) : *count;
  const int32_t before = i == 0 ? -1 : sorted[i - 1];
  const int32_t here = i == n ? u : sorted[i];
  for (int32_t j = before + 1; j <= here; ++j) starts[j] = static_cast<int32_t>(i);
}

__global__ void ListPieces(const int32_t* starts, uint32_t most, const int32_t* count,
                           int32_t* pieces, Piece* list, uint32_t* listed) {
  const uint32_t j = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t u = count == nullptr ? most : static_cast<uint32_t>(*count);
  if (j >= u) return;
  const int32_t start = starts[j], end = starts[j + 1];
  if (end - start <= kPiece) return;
  const uint32_t parts = static_cast<uint32_t>((end - start + kPiece - 1) / kPiece);
  const uint32_t first = atomicAdd(listed, parts);
  pieces[j] = static_cast<int32_t>(first);
  for (uint32_t i = 0; i < parts; ++i) {
    const int32_t at = start + static_cast<int32_t>(i) * kPiece;
    list[first + i] = {at, min(kPiece, end - at)};
  }
}

// Sums 32 columns of a piece in each warp.
template <class Vec>
__global__ void SumPieces(const float* values, uint32_t vectors, const int32_t* positions,
                          const Piece* list, const uint32_t* listed, float* sums) {
  const uint32_t warps = gridDim.x * (kThreads / 32);
  const uint32_t strips = (vectors + 31) / 32;
  const uint64_t total = uint64_t{*listed} * strips;
  const Vec* rows = reinterpret_cast<const Vec*>(values);
  for (uint64_t i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < total; i += warps) {
    const uint32_t which = static_cast<uint32_t>(i / strips);
    const uint32_t c = static_cast<uint32_t>(i % strips) * 32 + threadIdx.x % 32;
    if (c >= vectors) continue;
    const Piece piece = list[which];
    reinterpret_cast<Vec*>(sums)[static_cast<size_t>(which) * vectors + c] =
        SumInOrder<Vec>(piece.count, [&](int32_t k) {
          return __ldcs(rows + static_cast<size_t>(__ldg(positions + piece.start + k)) * vectors +
                        c);
        });
  }
}

// Sums a segment in each run of lanes.
template <class Vec>
__global__ void SumEach(const float* values, uint32_t vectors, SegmentsView segments, uint32_t u,
                        const int32_t* count, uint32_t log2_lanes, float* out) {
  const uint64_t thread = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t j = thread >> log2_lanes;
  if (j >= (count == nullptr ? u : static_cast<uint32_t>(*count))) return;
  const uint32_t lanes = 1u << log2_lanes;
  const int32_t start = segments.starts[j], size = segments.starts[j + 1] - start;
  for (uint32_t c = static_cast<uint32_t>(thread) & (lanes - 1); c < vectors; c += lanes) {
    const auto row = [&](int32_t i) { return segments.Row<Vec>(values, start + i, vectors, c); };
    reinterpret_cast<Vec*>(out)[j * vectors + c] =
        size > kPiece ? segments.SumPieces<Vec>(static_cast<uint32_t>(j), size, vectors, c)
                      : SumInOrder<Vec>(size, row);
  }
}

template <class Vec>
__global__ void GatherRows(const float* rows, uint32_t vectors, const int32_t* inverse, uint32_t n,
                           uint32_t log2_lanes, float* out) {
  constexpr uint32_t kAhead = 4;
  const uint32_t lanes = 1u << log2_lanes;
  const uint64_t runs = (uint64_t{gridDim.x} * kThreads) >> log2_lanes;
  const uint64_t run = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) >> log2_lanes;
  const Vec* from = reinterpret_cast<const Vec*>(rows);
  Vec* to = reinterpret_cast<Vec*>(out);
  for (uint32_t c = threadIdx.x & (lanes - 1); c < vectors; c += lanes) {
    Vec row[kAhead];
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      const uint64_t i = run + k * runs;
      if (i < n) row[k] = __ldg(from + static_cast<size_t>(__ldg(inverse + i)) * vectors + c);
    }
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      const uint64_t i = run + k * runs;
      if (i < n) __stcs(to + i * vectors + c, row[k]);
    }
  }
}

uint32_t Blocks(uint64_t threads) {
  return static_cast<uint32_t>((threads + kThreads - 1) / kThreads);
}

int Bits(int64_t values) {
  int bits = 1;
  while (bits < 31 && (int64_t{1} << bits) < values) ++bits;
  return bits;
}

int Log2LanesOf(uint32_t vectors) {
  int log2 = 0;
  while (log2 < 5 && (1u << log2) < vectors) ++log2;
  return log2;
}

bool IsVector(int64_t dim, const void* a, const void* b) {
  return dim % 4 == 0 &&
         (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

struct Scratch {
  int32_t* sorted;
  int32_t* positions;
  int32_t* numbers;
  int32_t* starts;
  int32_t* pieces;
  Piece* list;
  uint32_t* listed;
  float* sums;
  void* sort;
  size_t sort_bytes;
  size_t bytes;
};

Scratch Cut(int64_t n, int64_t u, int64_t dim, void* base) {
  Workspace space(base);
  Scratch s{};
  s.sorted = space.Take<int32_t>(n);
  s.positions = space.Take<int32_t>(n);
  s.numbers = space.Take<int32_t>(n);
  s.starts = space.Take<int32_t>(u + 1);
  s.pieces = space.Take<int32_t>(u);
  // Segments longer than kPiece have at most two pieces for each kPiece of their positions.
  const size_t most_pieces = static_cast<size_t>(2 * n / kPiece + 1);
  s.list = space.Take<Piece>(most_pieces);
  s.listed = space.Take<uint32_t>(1);
  s.sums = space.Take<float>(most_pieces * dim);
  CheckCuda(cub::DeviceRadixSort::SortPairs(nullptr, s.sort_bytes, s.sorted, s.sorted, s.numbers,
                                            s.positions, n, 0, Bits(u)),
            "sizing the sort of positions");
  s.sort = space.Take<char>(s.sort_bytes);
  s.bytes = space.bytes();
  return s;
}

}  // namespace

size_t SegmentsBytes(int64_t n, int64_t u, int64_t dim) { return Cut(n, u, dim, nullptr).bytes; }

SegmentsView MakeSegments(const float* values, int64_t dim, const int32_t* inverse, int64_t n,
                          int64_t u, const int32_t* count, void* workspace, cudaStream_t stream) {
  Scratch s = Cut(n, u, dim, workspace);
  const uint32_t items = static_cast<uint32_t>(n), most = static_cast<uint32_t>(u);
  if (n > 0) {
    Launch(Number, Blocks(n), kThreads, 0, stream, "sorting positions by row", s.numbers, items);
    CheckCuda(cub::DeviceRadixSort::SortPairs(s.sort, s.sort_bytes, inverse, s.sorted, s.numbers,
                                              s.positions, n, 0, Bits(u), stream),
              "sorting positions");
  }
  CheckCuda(cudaMemsetAsync(s.listed, 0, sizeof *s.listed, stream), "clearing a counter");
  Launch(FindStarts, Blocks(n + 1), kThreads, 0, stream, "sorting positions by row", s.sorted,
         items, most, count, s.starts);
  if (u > 0) {
    Launch(ListPieces, Blocks(u), kThreads, 0, stream, "sorting positions by row", s.starts, most,
           count, s.pieces, s.list, s.listed);
  }
  if (n > kPiece) {
    constexpr uint32_t kGrid = 512;
    if (IsVector(dim, values, s.sums)) {
      Launch(SumPieces<float4>, kGrid, kThreads, 0, stream, "sorting positions by row", values,
             static_cast<uint32_t>(dim / 4), s.positions, s.list, s.listed, s.sums);
    } else {
      Launch(SumPieces<float>, kGrid, kThreads, 0, stream, "sorting positions by row", values,
             static_cast<uint32_t>(dim), s.positions, s.list, s.listed, s.sums);
    }
  }
  return {s.starts, s.positions, s.pieces, s.sums};
}

void SumSegments(const float* values, int64_t dim, const SegmentsView& segments, int64_t u,
                 const int32_t* count, float* out, cudaStream_t stream) {
  if (u == 0) return;
  const bool vector = IsVector(dim, values, out);
  const uint32_t vectors = static_cast<uint32_t>(vector ? dim / 4 : dim);
  const uint32_t log2 = Log2LanesOf(vectors);
  const uint32_t blocks = Blocks(static_cast<uint64_t>(u) << log2);
  const auto kernel = vector ? SumEach<float4> : SumEach<float>;
  Launch(kernel, blocks, kThreads, 0, stream, "summing segments", values, vectors, segments,
         static_cast<uint32_t>(u), count, log2, out);
}

}  // namespace gmeta

using gmeta::Guarded;
using gmeta::Require;

size_t gmeta_gpu_segment_sum_workspace(int64_t n, int64_t u, int64_t dim) {
  size_t bytes = 0;
  Guarded([&] { bytes = gmeta::SegmentsBytes(n, u, dim); });
  return bytes;
}

int gmeta_gpu_segment_sum(const float* values, int64_t dim, const int32_t* inverse, int64_t n,
                          int64_t u, float* out, void* workspace, size_t workspace_bytes,
                          void* stream) {
  return Guarded([&] {
    Require(dim > 0 && n >= 0 && u >= 0 && n <= (1 << 30) && u <= (1 << 30),
            "segment_sum: dim must be positive, n and u within [0, 2^30], got dim " +
                std::to_string(dim) + ", n " + std::to_string(n) + ", u " + std::to_string(u));
    const size_t needed = gmeta::SegmentsBytes(n, u, dim);
    Require(workspace_bytes >= needed, "segment_sum: the workspace has " +
                                           std::to_string(workspace_bytes) + " bytes, but needs " +
                                           std::to_string(needed));
    if (u == 0) return;
    const auto on = static_cast<cudaStream_t>(stream);
    const gmeta::SegmentsView segments =
        gmeta::MakeSegments(values, dim, inverse, n, u, nullptr, workspace, on);
    gmeta::SumSegments(values, dim, segments, u, nullptr, out, on);
  });
}

int gmeta_gpu_gather_rows(const float* rows, int64_t dim, const int32_t* inverse, int64_t n,
                          float* out, void* stream) {
  return Guarded([&] {
    Require(dim > 0 && n >= 0 && n <= (1 << 30),
            "gather_rows: dim must be positive and n within [0, 2^30], got dim " +
                std::to_string(dim) + ", n " + std::to_string(n));
    if (n == 0) return;
    const auto on = static_cast<cudaStream_t>(stream);
    const bool vector = gmeta::IsVector(dim, rows, out);
    const uint32_t vectors = static_cast<uint32_t>(vector ? dim / 4 : dim);
    const uint32_t log2 = gmeta::Log2LanesOf(vectors);
    const uint32_t blocks = gmeta::Blocks((static_cast<uint64_t>(n) + 3) / 4 << log2);
    const auto kernel = vector ? gmeta::GatherRows<float4> : gmeta::GatherRows<float>;
    gmeta::Launch(kernel, blocks, gmeta::kThreads, 0, on, "gather_rows", rows, vectors, inverse,
                  static_cast<uint32_t>(n), log2, out);
  });
}
