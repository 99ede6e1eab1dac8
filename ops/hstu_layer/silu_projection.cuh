// A product of matrices and the activation of its columns, in one pass on Hopper.
//
//   Z = X W,  A = SiLU(Z[:, from:])        X (rows, inner), W (inner, columns)
//
// It is the projection of an HSTU layer: Z are u, v, q and k before their activation, which the
// gradient needs, A what attention reads. Beside a product and a pass of its own for SiLU, memory
// is spared the reading of Z, and A is written while the matrix units work.
//
// Layout. A block of threads owns a tile of 128 rows by 256 columns at a time. The sum's places go
// by in steps of 64: a box of X and four of W, by the copy engine, into one of four stages. W is
// read as it lies, rows of the sum ("transposed", wgmma.cuh). Three warpgroups: one thread of the
// first asks for copies, across tiles, as far ahead as there are stages; each of the others sums
// 64 rows by 256 columns in 128 registers a thread. Tiles are dealt out in turns, columns first, so
// that those in work at a time share rows of X, and W stays in the cache.
//
// Invariants. SiLU is computed from Z as it is rounded and written, by the function that a pass of
// its own uses: A has the same bits as gmeta_silu of Z. What lies outside of the matrices is read
// as zeros and never written, by the copy engine's own checks. An element's sum takes its places in
// rising order whatever the launch, so that results are the same to the last bit in each run.
//
// Why it should be fast, which is still to be measured. A step reads 48 KiB for 128 x 256 x 64
// products, which the cache can bring while they are made, and results leave by the copy engine,
// box by box of 16 rows of a warp's own, so that no warp waits for another. The two summing
// warpgroups never meet: one that is done with a tile writes its results while the other has the
// matrix units for itself, up to four steps long; by that it falls behind, and at the tile's end it
// is the other's turn. So rounding and SiLU run beside products.

#ifndef GMETA_OPS_HSTU_LAYER_SILU_PROJECTION_CUH_
#define GMETA_OPS_HSTU_LAYER_SILU_PROJECTION_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"
#include "ops/hopper/turn.cuh"
#include "ops/hopper/wgmma.cuh"
#include "ops/hstu_layer/activation.cuh"

namespace gmeta::hstu {

inline constexpr int kProjectionGroups = 2;  // warpgroups that sum
inline constexpr int kProjectionThreads = 128 * (1 + kProjectionGroups);
inline constexpr int kProjectionRows = 64 * kProjectionGroups, kProjectionColumns = 256;
inline constexpr int kProjectionPlaces = 64;   // of the sum, in a step
inline constexpr int kProjectionBoxRows = 16;  // of results, which a warp writes

struct ProjectionArguments {
  CUtensorMap x, w, z, activated;
  int rows, inner, columns;
  int activated_from;  // a column, at a box's edge

  __host__ __device__ __forceinline__ int ColumnTiles() const {
    return (columns + kProjectionColumns - 1) / kProjectionColumns;
  }
  __host__ __device__ __forceinline__ int Tiles() const {
    return (rows + kProjectionRows - 1) / kProjectionRows * ColumnTiles();
  }
  __device__ __forceinline__ int Steps() const {
    return (inner + kProjectionPlaces - 1) / kProjectionPlaces;
  }
};

template <class T>
struct ProjectionMemory {
  static constexpr int kStages = 4;
  static constexpr int kBoxes = kProjectionColumns / hopper::kBoxWidth;

  struct Stage {
    alignas(1024) T x[kProjectionRows * kProjectionPlaces];
    T w[kBoxes][kProjectionPlaces * hopper::kBoxWidth];
  };
  Stage stages[kStages];
  // Of each warp that sums two boxes of results: one is filled while the other leaves.
  alignas(1024) T out[4 * kProjectionGroups][2][kProjectionBoxRows * hopper::kBoxWidth];
  hopper::Barrier full[kStages], free[kStages];
};

// One thread: asks for the steps of all tiles of the block.
template <class T>
__device__ __forceinline__ void ProduceProjection(const ProjectionArguments& in,
                                                  ProjectionMemory<T>& memory) {
  using Memory = ProjectionMemory<T>;
  const int tiles = in.Tiles(), column_tiles = in.ColumnTiles(), steps = in.Steps();
  hopper::PrefetchMap(&in.x), hopper::PrefetchMap(&in.w);
  hopper::PrefetchMap(&in.z), hopper::PrefetchMap(&in.activated);
  hopper::Turn turn;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = tile / column_tiles * kProjectionRows;
    const int column = tile % column_tiles * kProjectionColumns;
    for (int step = 0; step < steps; ++step) {
      typename Memory::Stage& stage = memory.stages[turn.stage];
      hopper::Barrier* const full = &memory.full[turn.stage];
      const int place = step * kProjectionPlaces;
      memory.free[turn.stage].Wait(turn.phase ^ 1);
      full->ArriveExpecting(sizeof(stage));
      hopper::CopyBox(&in.x, stage.x, full, place, 0, row);
#pragma unroll
      for (int box = 0; box < Memory::kBoxes; ++box) {
        hopper::CopyBox(&in.w, stage.w[box], full, column + box * hopper::kBoxWidth, 0, place);
      }
      turn.Next<Memory::kStages>();
    }
  }
}

// One of the warpgroups that sum.
template <class T>
class ProjectionConsumer {
 public:
  using Memory = ProjectionMemory<T>;

  __device__ __forceinline__ ProjectionConsumer(const ProjectionArguments& in, Memory& memory)
      : in_(in), memory_(memory), group_(threadIdx.x / 128 - 1) {}

  __device__ __forceinline__ void Run() {
    const int tiles = in_.Tiles(), column_tiles = in_.ColumnTiles();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sums[kProjectionColumns / 2];
      Sum(sums);
      Write(tile / column_tiles * kProjectionRows, tile % column_tiles * kProjectionColumns, sums);
    }
    if (threadIdx.x % 32 == 0) hopper::AwaitReadBoxes<0>();  // before the memory is another's
  }

 private:
  // A tile's rows of the group.
  __device__ __forceinline__ void Sum(float (&sums)[kProjectionColumns / 2]) {
    const int steps = in_.Steps();
    int before = -1;  // the stage whose products may still be on their way
    for (int step = 0; step < steps; ++step) {
      typename Memory::Stage& stage = memory_.stages[turn_.stage];
      memory_.full[turn_.stage].Wait(turn_.phase);
      const uint64_t x =
          hopper::Describe(stage.x + group_ * 64 * kProjectionPlaces);  // K-major: a box
      const uint64_t w = hopper::Describe(stage.w[0], sizeof(stage.w[0]));
      hopper::Keep(sums);
      hopper::Begin();
#pragma unroll
      for (int i = 0; i < kProjectionPlaces / 16; ++i) {
        hopper::Product<T, 1>(sums, hopper::Advance(x, i * hopper::kNextColumns),
                              hopper::Advance(w, i * hopper::kNextRows), i > 0 || step > 0);
      }
      hopper::Commit();
      hopper::Wait<1>();
      if (before >= 0) memory_.free[before].ArriveAsWarp();
      before = turn_.stage;
      turn_.Next<Memory::kStages>();
    }
    hopper::Wait<0>();
    hopper::Keep(sums);
    memory_.free[before].ArriveAsWarp();
  }

  // Rounds, activates and sends off the warp's 16 rows.
  __device__ __forceinline__ void Write(int tile_row, int tile_column,
                                        const float (&sums)[kProjectionColumns / 2]) {
    const int row = tile_row + group_ * 64 + threadIdx.x % 128 / 32 * kProjectionBoxRows;
#pragma unroll
    for (int box = 0; box < Memory::kBoxes; ++box) {
      const int column = tile_column + box * hopper::kBoxWidth;
      if (column >= in_.columns) break;
      uint32_t pairs[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        pairs[i] = hopper::RoundedPair<T>(sums[box * 32 + 2 * i], sums[box * 32 + 2 * i + 1]);
      }
      Send(&in_.z, column, row, pairs);
      if (column < in_.activated_from) continue;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        T pair[2];
        std::memcpy(pair, &pairs[i], sizeof(pair));
        pairs[i] = hopper::RoundedPair<T>(Silu(static_cast<float>(pair[0])),
                                          Silu(static_cast<float>(pair[1])));
      }
      Send(&in_.activated, column - in_.activated_from, row, pairs);
    }
  }

  // A box, of which the thread has pairs as wgmma leaves them: (row, row + 8) by 8 columns.
  __device__ __forceinline__ void Send(const CUtensorMap* to, int column, int row,
                                       const uint32_t (&pairs)[16]) {
    const int lane = threadIdx.x % 32;
    T* const box = memory_.out[threadIdx.x / 32 - 4][next_box_];
    next_box_ ^= 1;
    // The box before the last one has been read: its memory is this one's.
    if (lane == 0) hopper::AwaitReadBoxes<1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int line = lane / 4 + 8 * (i % 2), unit = (i / 2) ^ (line % 8);
      std::memcpy(reinterpret_cast<char*>(box) + line * 128 + unit * 16 + lane % 4 * 4, &pairs[i],
                  4);
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) hopper::SendBox(to, box, column, 0, row);
  }

  const ProjectionArguments& in_;
  Memory& memory_;
  const int group_;
  int next_box_ = 0;
  hopper::Turn turn_;
};

template <class T>
__global__ void __launch_bounds__(kProjectionThreads, 1)
    ProjectionKernel(const __grid_constant__ ProjectionArguments in) {
#if GMETA_SM90A
  using Memory = ProjectionMemory<T>;
  Memory& memory = *reinterpret_cast<Memory*>(hopper::SharedMemory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      memory.full[i].Init(1);
      memory.free[i].Init(4 * kProjectionGroups * hopper::kWarpArrivals);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x == 0) ProduceProjection(in, memory);
  } else {
    hopper::TakeRegisters<232>();
    ProjectionConsumer<T>(in, memory).Run();
  }
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_HSTU_LAYER_SILU_PROJECTION_CUH_
