// Which parts of a batch's score matrices have to be computed: found once on the GPU, for all heads
// and all kernels.
//
// A mask is three numbers a row (tile.h's Visible): row i sees columns [0, first), [begin, end) and
// itself. Sequences are cut into strips of 64 rows. For each strip the plan keeps the least and the
// greatest of each of the three numbers. From these alone, by a few comparisons, a kernel knows for
// a range of columns that no row of a strip sees any of them (`Sees` is false: skip them), or that
// every row sees all of them (`SeesAll`: mask no score). Only the rest is masked number by number.
// No kernel needs the rule behind a mask. The same bounds are kept for each 32 strips of a
// sequence, so that a kernel skips 2,048 rows or columns at once: under a window most of a long
// sequence is hidden, and a strip's work must not grow with the length.
//
// A tile is two neighbouring strips of a sequence, or the odd last one. A block of threads takes
// one tile at a time. Tiles are listed in the order of work. Longer sequences come first, so that
// only short pieces of work are left at the end. Tiles of one sequence follow one another, so that
// all blocks that work on it at a time find its rows in the cache. Within a sequence, tiles with
// the most work under a causal mask come first: the last ones in the list of tiles of rows
// (`row_tiles`), the first ones in that of columns (`column_tiles`). Blocks of threads take the
// next tile when they are done (`NextWork`).
//
// The plan's memory holds the header, the number of each sequence's first strip, the strips, their
// groups, their places in the map of times, and the two lists. Four small launches make it. Nothing
// returns to the host, which knows only upper bounds (`MaxStrips`). If offsets don't rise from 0 to
// the number of tokens, the plan has no tiles and is marked, so that results become NaN and nothing
// is read out of bounds.

#ifndef GMETA_OPS_ATTENTION_GPU_PLAN_STRIPS_CUH_
#define GMETA_OPS_ATTENTION_GPU_PLAN_STRIPS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace gmeta::hstu {

inline constexpr int kStripRows = 64;
inline constexpr int kTileStrips = 2;
inline constexpr int kTileRows = kTileStrips * kStripRows;
inline constexpr int kGroupStrips = 32;
inline constexpr int kGroupRows = kGroupStrips * kStripRows;

struct Columns {
  int begin;
  int end;
};

struct Strip {
  int token;        // the sequence's first token
  int length;       // the sequence's length
  int row;          // place of the strip's first row in the sequence
  int first_strip;  // the sequence's first strip
  int first_min, first_max, begin_min, begin_max, end_min, end_max;

  // Returns whether any row may see any of the columns; `rows` is how many rows the bounds are of.
  __host__ __device__ bool Sees(Columns c, int rows = kStripRows) const {
    return c.begin < first_max || (c.begin < end_max && c.end > begin_min) ||
           (c.begin < row + rows && c.end > row);
  }
  // Returns whether all rows see all of the columns.
  __host__ __device__ bool SeesAll(Columns c) const {
    return c.end <= first_min || (c.begin >= begin_max && c.end <= end_min);
  }
  // Returns whether all of the strip's rows are in the sequence.
  __host__ __device__ bool whole() const { return row + kStripRows <= length; }
  // Returns the place past the last column that any row may see.
  __host__ __device__ int end() const {
    int end = first_max > end_max ? first_max : end_max;
    const int last_row = row + kStripRows < length ? row + kStripRows : length;
    return end > last_row ? end : last_row;
  }
  // Widens this strip's bounds to cover both strips.
  __host__ __device__ void Join(const Strip& o) {
    first_min = first_min < o.first_min ? first_min : o.first_min;
    first_max = first_max > o.first_max ? first_max : o.first_max;
    begin_min = begin_min < o.begin_min ? begin_min : o.begin_min;
    begin_max = begin_max > o.begin_max ? begin_max : o.begin_max;
    end_min = end_min < o.end_min ? end_min : o.end_min;
    end_max = end_max > o.end_max ? end_max : o.end_max;
  }
};

// What one row sees: [0, first), [begin, end) and itself.
struct RowView {
  int first;
  int begin;
  int end;

  // Returns which columns the row sees, of those that a thread holds in a product of kColumns
  // columns (wgmma.cuh). Column `column` + 8 j + e is in bit j + 16 e, for e = 0 and 1. A bit per
  // column pays off: making a row's mask takes a few dozen instructions, and then each number takes
  // one.
  template <int kColumns>
  __device__ __forceinline__ uint32_t Seen(int row, int column) const {
    constexpr int kPairs = kColumns / 8;
    static_assert(kPairs <= 16);
    // The columns before `end`, as bits.
    const auto before = [&](int end) {
      const auto of_half = [&](int e) {
        const int pairs = (end - column - e + 7) >> 3;
        return (1u << min(max(pairs, 0), kPairs)) - 1;
      };
      return of_half(0) | of_half(1) << 16;
    };
    uint32_t seen = before(first) | (before(end) & ~before(begin));
    const int own = row - column;
    if (own >= 0 && own < 8 * kPairs && (own & 7) < 2) seen |= 1u << ((own >> 3) + 16 * (own & 7));
    return seen;
  }
};

// Hands out numbers of work to the blocks of a launch. A launch restores its initial state, so one
// launch at a time may use it.
struct WorkQueue {
  int taken;
  int finished;
};

struct PlanHeader {
  int strips;
  int tiles;
  int invalid;  // nonzero: the offsets are impossible
  int unused;
  int64_t map_tiles;  // of all strips (time_map.cuh)
  WorkQueue forward, backward_columns, backward_rows;
};

// Returns the next work of a block that began with number blockIdx.x. One thread of the block calls
// it.
__device__ __forceinline__ int NextWork(WorkQueue* queue) {
  return static_cast<int>(gridDim.x) + atomicAdd(&queue->taken, 1);
}
// Leaves the queue. One thread of each block calls it, as its last use of the queue.
__device__ __forceinline__ void LeaveQueue(WorkQueue* queue) {
  if (atomicAdd(&queue->finished, 1) == static_cast<int>(gridDim.x) - 1) *queue = {0, 0};
}

// Fills the results, `width` numbers a token, with NaN, for a batch whose offsets are impossible.
template <class T>
__device__ void FillWithNan(T* to, int64_t stride, int64_t tokens, int width) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < tokens * width; i += threads) {
    to[i / width * stride + i % width] = static_cast<T>(NAN);
  }
}

// The parts of a plan, and where they lie.
struct Plan {
  PlanHeader* header;
  int64_t* first_tile;  // (strips + 1): of the map of times, each strip's first tile
  int* first_strip;     // (batch + 1)
  Strip* strips;
  Strip* groups;      // by first strip: the bounds of up to 32 strips from it on
  int* row_tiles;     // each tile's first strip, in the order of work by rows
  int* column_tiles;  // the same, in the order of work by columns

  __host__ __device__ static int64_t MaxStrips(int64_t tokens, int64_t batch) {
    return tokens / kStripRows + batch;
  }
  __host__ __device__ static int64_t MaxTiles(int64_t tokens, int64_t batch) {
    return tokens / kTileRows + batch;
  }

  static size_t Bytes(int64_t tokens, int64_t batch) {
    return sizeof(PlanHeader) + sizeof(int64_t) * (MaxStrips(tokens, batch) + 1) +
           2 * sizeof(Strip) * MaxStrips(tokens, batch) +
           sizeof(int) * (batch + 1 + 2 * MaxTiles(tokens, batch));
  }
  static Plan In(void* memory, int64_t tokens, int64_t batch) {
    Plan plan;
    plan.header = static_cast<PlanHeader*>(memory);
    plan.first_tile = reinterpret_cast<int64_t*>(plan.header + 1);
    plan.strips = reinterpret_cast<Strip*>(plan.first_tile + MaxStrips(tokens, batch) + 1);
    plan.groups = plan.strips + MaxStrips(tokens, batch);
    plan.first_strip = reinterpret_cast<int*>(plan.groups + MaxStrips(tokens, batch));
    plan.row_tiles = plan.first_strip + batch + 1;
    plan.column_tiles = plan.row_tiles + MaxTiles(tokens, batch);
    return plan;
  }
};

// Makes the plan of a batch: `offsets` (batch + 1) int64, `visible` (tokens, 3) int32.
void MakePlan(const int64_t* offsets, const int32_t* visible, int64_t tokens, int64_t batch,
              const Plan& plan, cudaStream_t stream);

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_PLAN_STRIPS_CUH_
