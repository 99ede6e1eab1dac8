// The kernel that makes the map of times (time_map.cuh).

#include <climits>

#include "ops/attention/gpu/launch.cuh"
#include "ops/attention/gpu/plan/time_map.cuh"
#include "ops/attention/time_buckets.h"
#include "ops/common/gpu/cuda_launch.cuh"

namespace gmeta::hstu {
namespace {

constexpr int kMapThreads = kTileUnits;  // one for each unit of a tile
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

struct MapArguments {
  Plan plan;
  const int64_t* row_times;
  const int64_t* column_times;
  MapTile* tiles;
  int size;  // of starts
  int64_t starts[kMostBuckets];
};

struct Buckets {
  uint64_t starts[kMostBuckets];
  uint8_t of_key[kTimeKeys];

  __device__ __forceinline__ uint32_t Of(uint64_t apart) const {
    const uint32_t found = of_key[KeyOf(apart)];
    return found + (apart >= starts[found]);
  }
};

// The least and the greatest of some times.
struct Span {
  int64_t least, most;
};

__device__ Span SpanOf(const int64_t* times) {
  Span span{INT64_MAX, INT64_MIN};
  for (int i = 0; i < kSquare; ++i) {
    span = {min(span.least, times[i]), max(span.most, times[i])};
  }
  return span;
}

// A block of threads fills the tiles of a strip. A square whose least and greatest difference fall
// into one bucket needs no others: buckets don't decrease.
__global__ void __launch_bounds__(kMapThreads)
    FillTimeMap(const __grid_constant__ MapArguments in) {
  __shared__ Buckets buckets;
  __shared__ int64_t row_times[kStripRows], column_times[kStripRows];
  __shared__ Span spans[2][kSquares];
  __shared__ unsigned least[2][kSquares], most[2][kSquares];
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kMostBuckets; i += kMapThreads) {
    buckets.starts[i] = i < in.size ? static_cast<uint64_t>(in.starts[i]) : kNever;
  }
  for (int i = thread; i < kTimeKeys; i += kMapThreads) {
    buckets.of_key[i] = BucketOfKey(i, in.starts, in.size);
  }
  const int strips = in.plan.header->strips;
  for (int index = static_cast<int>(blockIdx.x); index < strips;
       index += static_cast<int>(gridDim.x)) {
    const Strip& strip = in.plan.strips[index];
    const int64_t first = in.plan.first_tile[index];
    const int tiles = static_cast<int>(in.plan.first_tile[index + 1] - first);
    // Tokens behind the sequence's end have its last token's time: their scores don't count.
    const auto time = [&](const int64_t* times, int place) {
      return times[strip.token + min(place, strip.length - 1)];
    };
    for (int tile = 0; tile < tiles; ++tile) {
      __syncthreads();
      if (thread < kStripRows) {
        row_times[thread] = time(in.row_times, strip.row + thread);
        column_times[thread] = time(in.column_times, tile * kStripRows + thread);
      }
      if (thread < 2 * kSquares) {
        least[thread / kSquares][thread % kSquares] = UINT_MAX;
        most[thread / kSquares][thread % kSquares] = 0;
      }
      __syncthreads();
      if (thread < 2 * kSquares) {
        const int64_t* const times = thread < kSquares ? row_times : column_times;
        spans[thread / kSquares][thread % kSquares] = SpanOf(times + thread % kSquares * kSquare);
      }
      __syncthreads();
      const int of_rows = thread / (16 * kSquares), of_columns = thread / 16 % kSquares;
      const Span r = spans[0][of_rows], c = spans[1][of_columns];
      constexpr int64_t kSafe = int64_t{1} << 61;  // differences don't overflow
      uint32_t low = 0, high = 1;
      if (min(r.least, c.least) > -kSafe && max(r.most, c.most) < kSafe) {
        const int64_t nearest = max(max(r.least - c.most, c.least - r.most), int64_t{0});
        low = buckets.Of(static_cast<uint64_t>(nearest));
        high = buckets.Of(static_cast<uint64_t>(max(r.most - c.least, c.most - r.least)));
      }
      uint4 unit;
      if (low == high) {
        unit.x = unit.y = unit.z = unit.w = low * 0x01010101u;
      } else {
        low = UINT_MAX, high = 0;
        const int row = of_rows * kSquare + thread / 4 % 4 * 2,
                  column = of_columns * kSquare + thread % 4 * 2;
        uint32_t words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          words[word] = 0;
#pragma unroll
          for (int byte = 0; byte < 4; ++byte) {
            const auto a = static_cast<uint64_t>(row_times[row + word / 2 * 8 + byte / 2]),
                       b = static_cast<uint64_t>(column_times[column + word % 2 * 8 + byte % 2]);
            const uint32_t bucket = buckets.Of(Apart(static_cast<int64_t>(a - b)));
            words[word] |= bucket << (8 * byte);
            low = min(low, bucket), high = max(high, bucket);
          }
        }
        unit = {words[0], words[1], words[2], words[3]};
      }
      in.tiles[first + tile].units[thread] = unit;
      for (int by = 8; by > 0; by /= 2) {  // a half of a warp has a square
        low = min(low, __shfl_xor_sync(kWholeWarp, low, by));
        high = max(high, __shfl_xor_sync(kWholeWarp, high, by));
      }
      if (thread % 16 == 0) {
        atomicMin(&least[0][of_rows], low), atomicMax(&most[0][of_rows], high);
        atomicMin(&least[1][of_columns], low), atomicMax(&most[1][of_columns], high);
      }
      __syncthreads();
      if (thread < 2 * kSquares) {
        const int which = thread / kSquares, square = thread % kSquares;
        TileRuns& runs = in.tiles[first + tile].runs;
        (which == 0 ? runs.rows : runs.columns)[square] =
            static_cast<Run>(least[which][square] | most[which][square] << 8);
      }
    }
  }
}

}  // namespace
}  // namespace gmeta::hstu

using namespace gmeta::hstu;
using gmeta::Guarded;

int gmeta_hstu_time_map_bytes(const void* plan, int64_t tokens, int32_t batch, int64_t* bytes,
                              void* stream) {
  return Guarded([&] {
    const Plan of = Plan::In(const_cast<void*>(plan), tokens, batch);
    int64_t tiles = 0;
    const auto on = static_cast<cudaStream_t>(stream);
    gmeta::CheckCuda(
        cudaMemcpyAsync(&tiles, &of.header->map_tiles, sizeof(tiles), cudaMemcpyDeviceToHost, on),
        "hstu attention, size of the map of times");
    gmeta::CheckCuda(cudaStreamSynchronize(on), "hstu attention, size of the map of times");
    *bytes = tiles * static_cast<int64_t>(sizeof(MapTile));
  });
}

int gmeta_hstu_time_map(const void* plan, int64_t tokens, int32_t batch, const int64_t* row_times,
                        const int64_t* column_times, const int64_t* starts, int32_t size, void* map,
                        void* stream) {
  return Guarded([&] {
    gmeta::Require(
        size >= 0 && AreTimeBuckets(starts, static_cast<size_t>(size)),
        "hstu attention: a bias of times has at most 256 buckets, each at least 25% wider "
        "than the one before, got " +
            std::to_string(size + 1) + " or narrower ones");
    MapArguments in{};
    in.plan = Plan::In(const_cast<void*>(plan), tokens, batch);
    in.row_times = row_times, in.column_times = column_times;
    in.tiles = static_cast<MapTile*>(map);
    in.size = size;
    for (int i = 0; i < size; ++i) in.starts[i] = starts[i];
    const int64_t strips = Plan::MaxStrips(tokens, batch);
    if (strips == 0) return;
    gmeta::Launch(FillTimeMap, static_cast<unsigned>(strips), kMapThreads, 0,
                  static_cast<cudaStream_t>(stream), "hstu attention, map of times", in);
  });
}
