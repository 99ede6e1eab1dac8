// The map of times: the bucket of every pair of a row and a column that any attention of a batch
// reads (time_buckets.h). It is made once. All heads, layers and passes read it.
//
// A score leaves room for few instructions beyond those that it needs anyway: finding a bucket
// takes about twenty, reading one takes two. The price is a byte for each pair: 134 MB for 16
// sequences of 4,096 under a causal mask.
//
// Layout. A tile has 64 rows and 64 columns. A strip of 64 rows (strips.cuh) has its tiles of
// columns side by side, from the first column to the last that one of its rows may see
// (Plan::first_tile). Within a tile, squares of 16 by 16 lie one after another, and in a square 16
// units of 16 bytes, one for every 2 rows b and 2 columns d of each 8 by 8: the rows 2 b + {0, 1}
// and the columns 2 d + {0, 1} of all four 8 by 8 squares.
//
//   bytes [row / 16][column / 16][row / 2 % 4][column / 2 % 4][row / 8 % 2][column / 8 % 2]
//         [row % 2][column % 2]
//
// A thread holds numbers of two own tokens 8 apart, and of pairs of others (wgmma.cuh). Whether own
// tokens are rows or columns, it uses half of each word of its units, its neighbour uses the other
// half, and a warp reads 256 bytes in a row.
//
// Most neighbours have one bucket in common, since buckets are wide where tokens are far apart. For
// each run, that is 16 own tokens and 64 others, the map has the least and the greatest bucket. The
// bytes are only read where these differ.

#ifndef GMETA_OPS_ATTENTION_GPU_PLAN_TIME_MAP_CUH_
#define GMETA_OPS_ATTENTION_GPU_PLAN_TIME_MAP_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/gpu/plan/strips.cuh"

namespace gmeta::hstu {

inline constexpr int kSquare = 16;                     // rows and columns of a square
inline constexpr int kSquares = kStripRows / kSquare;  // squares in a row of a tile
inline constexpr int kTileUnits = 256;                 // units of 16 bytes in a tile

// The buckets of a run: the least is in the lower byte, the greatest in the upper one.
using Run = uint16_t;
__host__ __device__ __forceinline__ int LeastOf(uint32_t run) { return run & 0xFF; }
__host__ __device__ __forceinline__ int GreatestOf(uint32_t run) { return run >> 8; }
__host__ __device__ __forceinline__ bool IsDivided(uint32_t run) {
  return LeastOf(run) != GreatestOf(run);
}

// The runs of 16 rows and all 64 columns of a tile, and of 16 columns and all 64 rows.
struct TileRuns {
  Run rows[kSquares];
  Run columns[kSquares];
};

struct alignas(16) MapTile {
  uint4 units[kTileUnits];
  TileRuns runs;
};
static_assert(sizeof(MapTile) == 16 * kTileUnits + 16);

// Returns the number of a unit in its tile. Own tokens are rows, or columns: `own` is their square,
// `other` that of the others; `lane` is the thread's place in its warp.
template <bool kOwnRows>
__host__ __device__ __forceinline__ int MapUnit(int own, int other, int lane) {
  const int of_own = lane / 8, of_other = lane % 4;
  return kOwnRows ? (own * kSquares + other) * 16 + of_own * 4 + of_other
                  : (other * kSquares + own) * 16 + of_other * 4 + of_own;
}

// Returns which byte of its word a number is, for the other token `e` (0 or 1) of a pair.
template <bool kOwnRows>
__host__ __device__ __forceinline__ int MapByte(int e, int lane) {
  const int of_own = lane / 4 % 2;
  return kOwnRows ? 2 * of_own + e : 2 * e + of_own;
}

// Returns which word of its unit a number is, for own tokens 8 `i` further and others 8 `j`.
template <bool kOwnRows>
__host__ __device__ __forceinline__ constexpr int MapWord(int i, int j) {
  return kOwnRows ? 2 * i + j : 2 * j + i;
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_PLAN_TIME_MAP_CUH_
