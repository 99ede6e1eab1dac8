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

// The times of a tile's rows (0) and columns (1), and the spans of each 16 of them.
struct TileTimes {
  int64_t of[2][kStripRows];
  Span spans[2][kSquares];
};

// A unit of a tile, and its least and greatest bucket.
struct Unit {
  uint4 bytes;
  uint32_t least, most;
};

// Returns the unit if the least and the greatest difference in its square have one bucket: then all
// between have it, since buckets don't decrease. Otherwise `least` is above `most`.
__device__ Unit UnitOfSquare(const Buckets& buckets, const Span& rows, const Span& columns) {
  constexpr int64_t kSafe = int64_t{1} << 61;  // differences don't overflow
  const Unit none{{}, 1, 0};
  if (min(rows.least, columns.least) <= -kSafe || max(rows.most, columns.most) >= kSafe)
    return none;
  const int64_t least = max(max(rows.least - columns.most, columns.least - rows.most), int64_t{0});
  const int64_t most = max(rows.most - columns.least, columns.most - rows.least);
  const uint32_t bucket = buckets.Of(static_cast<uint64_t>(least));
  if (bucket != buckets.Of(static_cast<uint64_t>(most))) return none;
  const uint32_t word = bucket * 0x01010101u;
  return {{word, word, word, word}, bucket, bucket};
}

// Returns the unit from its first row and column on, pair by pair.
__device__ Unit UnitOfPairs(const Buckets& buckets, const int64_t* rows, const int64_t* columns) {
  uint32_t words[4], least = UINT_MAX, most = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    words[word] = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const auto row = static_cast<uint64_t>(rows[word / 2 * 8 + byte / 2]),
                 column = static_cast<uint64_t>(columns[word % 2 * 8 + byte % 2]);
      const uint32_t bucket = buckets.Of(Apart(static_cast<int64_t>(row - column)));
      words[word] |= bucket << (8 * byte);
      least = min(least, bucket), most = max(most, bucket);
    }
  }
  return {{words[0], words[1], words[2], words[3]}, least, most};
}

// Returns the unit of a number in its tile.
__device__ Unit UnitOf(const Buckets& buckets, const TileTimes& times, int number) {
  const int row = number / (16 * kSquares), column = number / 16 % kSquares;
  const Unit unit = UnitOfSquare(buckets, times.spans[0][row], times.spans[1][column]);
  if (unit.least <= unit.most) return unit;
  return UnitOfPairs(buckets, times.of[0] + row * kSquare + number / 4 % 4 * 2,
                     times.of[1] + column * kSquare + number % 4 * 2);
}

// A block of threads fills the tiles of a strip, each thread a unit.
__global__ void __launch_bounds__(kMapThreads)
    FillTimeMap(const __grid_constant__ MapArguments in) {
  __shared__ Buckets buckets;
  __shared__ TileTimes times;
  __shared__ unsigned least[2][kSquares], most[2][kSquares];
  const int thread = static_cast<int>(threadIdx.x), index = static_cast<int>(blockIdx.x);
  if (index >= in.plan.header->strips) return;
  for (int i = thread; i < kMostBuckets; i += kMapThreads) {
    buckets.starts[i] = i < in.size ? static_cast<uint64_t>(in.starts[i]) : kNever;
  }
  for (int i = thread; i < kTimeKeys; i += kMapThreads) {
    buckets.of_key[i] = BucketOfKey(i, in.starts, in.size);
  }
  const Strip& strip = in.plan.strips[index];
  const int64_t first = in.plan.first_tile[index], end = in.plan.first_tile[index + 1];
  for (int64_t tile = first; tile < end; ++tile) {
    __syncthreads();
    const int which = thread / kStripRows;  // rows or columns
    if (which < 2) {
      const int begin = which == 0 ? strip.row : static_cast<int>(tile - first) * kStripRows;
      // Tokens past the sequence's end have its last token's time: their scores don't count.
      const int place = min(begin + thread % kStripRows, strip.length - 1);
      const int64_t* const of = which == 0 ? in.row_times : in.column_times;
      times.of[which][thread % kStripRows] = of[strip.token + place];
    }
    const bool has_run = thread < 2 * kSquares;
    const int side = thread / kSquares, square = thread % kSquares;
    if (has_run) least[side][square] = UINT_MAX, most[side][square] = 0;
    __syncthreads();
    if (has_run) times.spans[side][square] = SpanOf(times.of[side] + square * kSquare);
    __syncthreads();
    const Unit unit = UnitOf(buckets, times, thread);
    in.tiles[tile].units[thread] = unit.bytes;
    uint32_t low = unit.least, high = unit.most;
    for (int by = 8; by > 0; by /= 2) {  // a half of a warp has a square
      low = min(low, __shfl_xor_sync(kWholeWarp, low, by));
      high = max(high, __shfl_xor_sync(kWholeWarp, high, by));
    }
    if (thread % 16 == 0) {
      const int of_rows = thread / (16 * kSquares), of_columns = thread / 16 % kSquares;
      atomicMin(&least[0][of_rows], low), atomicMax(&most[0][of_rows], high);
      atomicMin(&least[1][of_columns], low), atomicMax(&most[1][of_columns], high);
    }
    __syncthreads();
    if (has_run) {
      TileRuns& runs = in.tiles[tile].runs;
      (side == 0 ? runs.rows : runs.columns)[square] =
          static_cast<Run>(least[side][square] | most[side][square] << 8);
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
        "than the previous one, got " +
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
