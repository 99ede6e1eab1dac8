// Which parts of a batch's score matrices have to be computed: found once on the GPU, for all heads
// and all kernels.
//
// A mask is three numbers a row (tile.h's Visible): row i sees columns [0, first), [begin, end) and
// itself. Sequences are cut into strips of 64 rows, and of each strip the plan keeps the least and
// the greatest of the three numbers. From these alone a kernel tells in a few comparisons whether
// no row of a strip sees any of some columns (`Sees`: skip them), or every row all of them
// (`SeesAll`: no score is to be masked); only what is between is masked number by number. The rule
// behind a mask is nowhere needed.
//
// A tile is two neighbouring strips of a sequence, or the odd last one: what a block of threads
// takes at a time. Tiles are listed in the order of work, longer sequences first, so that at the
// end only short pieces of work are left, and those of a sequence one after another, so that all
// who work on it at a time find its rows in the cache. Within a sequence the tiles that a causal
// mask gives most work come first: for those who go by rows (`row_tiles`) the last, by columns
// (`column_tiles`) the first. Blocks of threads take the next one when they are done (`NextWork`).
//
// The plan's memory: the header, the number of each sequence's first strip, the strips, the two
// lists. Two small launches make it; nothing returns to the host, who knows only upper bounds
// (`MaxStrips`). Offsets that don't rise from 0 to the number of tokens make a plan without tiles,
// which is marked, so that results become NaN and nothing is read where there is nothing.

#ifndef GMETA_OPS_ATTENTION_GPU_STRIPS_CUH_
#define GMETA_OPS_ATTENTION_GPU_STRIPS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace gmeta::hstu {

inline constexpr int kStripRows = 64;
inline constexpr int kTileStrips = 2;
inline constexpr int kTileRows = kTileStrips * kStripRows;

struct Columns {
  int begin;
  int end;
};

struct Strip {
  int token;        // of the sequence's first row
  int length;       // of the sequence
  int row;          // the strip's first, in the sequence
  int first_strip;  // of the sequence
  int first_min, first_max, begin_min, begin_max, end_min, end_max;

  // Whether any row may see any of the columns.
  __host__ __device__ bool Sees(Columns c) const {
    return c.begin < first_max || (c.begin < end_max && c.end > begin_min) ||
           (c.begin < row + kStripRows && c.end > row);
  }
  // Whether all rows see all of the columns.
  __host__ __device__ bool SeesAll(Columns c) const {
    return c.end <= first_min || (c.begin >= begin_max && c.end <= end_min);
  }
  // Whether all of its rows are in the sequence.
  __host__ __device__ bool whole() const { return row + kStripRows <= length; }
  // Behind the last column that any row may see.
  __host__ __device__ int end() const {
    int end = first_max > end_max ? first_max : end_max;
    const int last_row = row + kStripRows < length ? row + kStripRows : length;
    return end > last_row ? end : last_row;
  }
  // What both together see.
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

  // Of the columns that a thread has of a row of a product of kColumns columns (wgmma.cuh):
  // `column`
  // + 8 j + e in bit j + 16 e, for e = 0 and 1. A bit a column is worth it: the mask of a row is
  // made in a few dozen instructions, and then costs one for each number.
  template <int kColumns>
  __device__ __forceinline__ uint32_t Seen(int row, int column) const {
    constexpr int kPairs = kColumns / 8;
    static_assert(kPairs <= 16);
    // The columns before `end`.
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

// Hands out numbers of work to the blocks of a launch. A launch leaves it as it found it, so one at
// a time may use it.
struct WorkQueue {
  int taken;
  int finished;
};

struct PlanHeader {
  int strips;
  int tiles;
  int invalid;  // the offsets can't be
  int unused;
  WorkQueue forward, backward_columns, backward_rows;
};

// The next work of a block that began with number blockIdx.x. One thread of the block.
__device__ __forceinline__ int NextWork(WorkQueue* queue) {
  return static_cast<int>(gridDim.x) + atomicAdd(&queue->taken, 1);
}
// The last thing that one thread of each block does with a queue.
__device__ __forceinline__ void LeaveQueue(WorkQueue* queue) {
  if (atomicAdd(&queue->finished, 1) == static_cast<int>(gridDim.x) - 1) *queue = {0, 0};
}

// What becomes of the results, `width` numbers a token, of a batch whose offsets can't be.
template <class T>
__device__ void FillWithNan(T* to, int64_t stride, int64_t tokens, int width) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < tokens * width; i += threads) {
    to[i / width * stride + i % width] = static_cast<T>(NAN);
  }
}

// Where the parts of a plan lie.
struct Plan {
  PlanHeader* header;
  int* first_strip;  // (batch + 1)
  Strip* strips;
  int* row_tiles;     // the number of the first strip of each tile, in the order of work
  int* column_tiles;  // the same, for those who go by columns

  __host__ __device__ static int64_t MaxStrips(int64_t tokens, int64_t batch) {
    return tokens / kStripRows + batch;
  }
  __host__ __device__ static int64_t MaxTiles(int64_t tokens, int64_t batch) {
    return tokens / kTileRows + batch;
  }

  static size_t Bytes(int64_t tokens, int64_t batch) {
    return sizeof(PlanHeader) + sizeof(Strip) * MaxStrips(tokens, batch) +
           sizeof(int) * (batch + 1 + 2 * MaxTiles(tokens, batch));
  }
  static Plan In(void* memory, int64_t tokens, int64_t batch) {
    Plan plan;
    plan.header = static_cast<PlanHeader*>(memory);
    plan.strips = reinterpret_cast<Strip*>(plan.header + 1);
    plan.first_strip = reinterpret_cast<int*>(plan.strips + MaxStrips(tokens, batch));
    plan.row_tiles = plan.first_strip + batch + 1;
    plan.column_tiles = plan.row_tiles + MaxTiles(tokens, batch);
    return plan;
  }
};

// Makes the plan of a batch: `offsets` (batch + 1) int64, `visible` (tokens, 3) int32.
void MakePlan(const int64_t* offsets, const int32_t* visible, int64_t tokens, int64_t batch,
              const Plan& plan, cudaStream_t stream);

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_STRIPS_CUH_
