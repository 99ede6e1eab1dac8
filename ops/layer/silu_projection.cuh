// A product of matrices and the activation of its columns, in one pass on Hopper.
//
//   Z = X W,  A = SiLU(Z[:, from:])        X (rows, inner), W (inner, columns)
//
// It is the projection of an HSTU layer. Z is u, v, q and k before their activation, which the
// gradient needs; attention reads A. Compared with a product and a separate pass for SiLU, memory
// doesn't read Z again, and A is written while the matrix units work.
//
// Layout. A block of threads owns a tile of 128 rows by 256 columns at a time. It goes through the
// places of the sum in steps of 64: the copy engine brings a box of X and four of W into one of
// four stages. W is read in its own layout, with the places of the sum as rows ("transposed",
// wgmma.cuh). There are three warpgroups: one thread of the first requests copies, across tiles, as
// far ahead as there are stages; each of the others sums 64 rows by 256 columns in 128 registers a
// thread. Blocks get tiles in turns, columns first, so that the tiles in work at a time share rows
// of X, and W stays in the cache.
//
// Invariants. SiLU is computed from Z after it is rounded for writing, by the function that a
// separate pass uses: A has the same bits as gmeta_silu of Z. The copy engine's own checks read
// everything outside of the matrices as zeros and never write it. An element's sum takes its places
// in rising order whatever the launch, so that results are the same to the last bit in each run.
//
// Why it is fast. The matrix units have work all the time. A finished tile is rounded to 64
// registers a thread, and the next one's sums begin. While they run, the warp activates the
// finished tile and sends it to memory, an eighth at a time, spread over the steps. So results also
// leave evenly. Written at once, a tile's 128 KiB took a quarter of the time, nothing else ran
// meanwhile (two warpgroups can be four steps apart, which is less than that takes), and all blocks
// wrote together. Besides its numbers, a part costs a fence and a request to the copy engine: there
// is one of each for a box together with its activated numbers. Each row of tiles starts one column
// further: otherwise the same blocks would always get the columns without activation. Clusters of
// blocks that share boxes of W, and loads of the cache with them, were no faster.

#ifndef GMETA_OPS_LAYER_SILU_PROJECTION_CUH_
#define GMETA_OPS_LAYER_SILU_PROJECTION_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"
#include "ops/hopper/turn.cuh"
#include "ops/hopper/wgmma.cuh"
#include "ops/layer/activation.cuh"

namespace gmeta::hstu {

inline constexpr int kProjectionGroups = 2;  // warpgroups that sum
inline constexpr int kProjectionThreads = 128 * (1 + kProjectionGroups);
inline constexpr int kProjectionRows = 64 * kProjectionGroups, kProjectionColumns = 256;
inline constexpr int kProjectionPlaces = 64;   // places of the sum in a step
inline constexpr int kProjectionBoxRows = 16;  // rows of results in a box, which a warp writes

struct ProjectionArguments {
  CUtensorMap x, w, z, activated;
  int rows, inner, columns;
  int activated_from;  // first activated column, at a box's edge

  __host__ __device__ __forceinline__ int ColumnTiles() const {
    return (columns + kProjectionColumns - 1) / kProjectionColumns;
  }
  __host__ __device__ __forceinline__ int Tiles() const {
    return (rows + kProjectionRows - 1) / kProjectionRows * ColumnTiles();
  }
  __device__ __forceinline__ int Steps() const {
    return (inner + kProjectionPlaces - 1) / kProjectionPlaces;
  }
  __device__ __forceinline__ int Row(int tile) const {
    return tile / ColumnTiles() * kProjectionRows;
  }
  __device__ __forceinline__ int Column(int tile) const {
    const int tiles = ColumnTiles();
    return (tile % tiles + tile / tiles) % tiles * kProjectionColumns;
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
  // For each warp that sums: a box of results, and a box of the same numbers activated.
  struct Out {
    T z[kProjectionBoxRows * hopper::kBoxWidth], activated[kProjectionBoxRows * hopper::kBoxWidth];
  };
  alignas(1024) Out out[4 * kProjectionGroups];
  hopper::Barrier full[kStages], free[kStages];
};

// Requests the copies for the steps of all tiles of the block. One thread.
template <class T>
__device__ __forceinline__ void ProduceProjection(const ProjectionArguments& in,
                                                  ProjectionMemory<T>& memory) {
  using Memory = ProjectionMemory<T>;
  const int tiles = in.Tiles(), steps = in.Steps();
  hopper::PrefetchMap(&in.x), hopper::PrefetchMap(&in.w);
  hopper::PrefetchMap(&in.z), hopper::PrefetchMap(&in.activated);
  hopper::Turn turn;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = in.Row(tile), column = in.Column(tile);
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

// A warp's part of the tile that was summed last, rounded, and the writing of it.
template <class T>
class ProjectionWriter {
 public:
  using Memory = ProjectionMemory<T>;
  static constexpr int kParts = 2 * Memory::kBoxes;  // parts, which Write takes one after another

  __device__ __forceinline__ ProjectionWriter(const ProjectionArguments& in, Memory& memory)
      : in_(in), out_(memory.out[threadIdx.x / 32 - 4]), column_(in.columns) {}

  // Takes the sums of the warp's 16 rows from `row` on, as wgmma leaves them.
  __device__ __forceinline__ void Take(int row, int column,
                                       const float (&sums)[kProjectionColumns / 2]) {
    row_ = row, column_ = column;
#pragma unroll
    for (int i = 0; i < kProjectionColumns / 4; ++i) {
      pairs_[i] = hopper::RoundedPair<T>(sums[2 * i], sums[2 * i + 1]);
    }
  }

  // Writes half of a box; the second half also sends the box. Does nothing if no tile was taken.
  template <int kPart>
  __device__ __forceinline__ void Write() {
    constexpr int kBox = kPart / 2, kHalf = kPart % 2;
    const int column = column_ + kBox * hopper::kBoxWidth;
    if (column >= in_.columns) return;
    const bool is_activated = column >= in_.activated_from;
    const bool first_lane = threadIdx.x % 32 == 0;
    const uint32_t* const pairs = pairs_ + 16 * kBox + 8 * kHalf;
    if constexpr (kHalf == 0) {
      if (first_lane) hopper::AwaitReadBoxes<0>();  // the earlier boxes, from the same memory
      __syncwarp();
    }
    Store<kHalf>(out_.z, pairs);
    if (is_activated) {
      uint32_t activated[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) activated[i] = Activated(pairs[i]);
      Store<kHalf>(out_.activated, activated);
    }
    if constexpr (kHalf == 1) {
      hopper::FenceAsyncProxy();
      __syncwarp();
      if (!first_lane) return;
      hopper::SendBox(&in_.z, out_.z, column, 0, row_);
      if (is_activated) {
        hopper::SendBox(&in_.activated, out_.activated, column - in_.activated_from, 0, row_);
      }
    }
  }

  // Writes the last tile at once, since no other is summed meanwhile.
  __device__ __forceinline__ void Finish() {
    WriteAll(std::make_integer_sequence<int, kParts>());
    if (threadIdx.x % 32 == 0) hopper::AwaitReadBoxes<0>();  // before this memory is reused
  }

 private:
  template <int... kEach>
  __device__ __forceinline__ void WriteAll(std::integer_sequence<int, kEach...>) {
    (Write<kEach>(), ...);
  }

  __device__ __forceinline__ static uint32_t Activated(uint32_t z) {
    T pair[2];
    std::memcpy(pair, &z, sizeof(pair));
    return hopper::RoundedPair<T>(Silu(static_cast<float>(pair[0])),
                                  Silu(static_cast<float>(pair[1])));
  }

  // Stores 32 columns of 16 rows of a box, in its swizzle, as units of 8 numbers. A lane gives the
  // address of a row of one of the four matrices: rows 0 to 7 and 8 to 15 of a unit, then the same
  // of the next unit.
  template <int kHalf>
  __device__ __forceinline__ void Store(T* box, const uint32_t* pairs) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int unit = (4 * kHalf + 2 * i + lane / 16) ^ (lane % 8);
      hopper::StoreMatrices(box + lane % 16 * hopper::kBoxWidth + unit * 8, pairs + 4 * i);
    }
  }

  const ProjectionArguments& in_;
  typename Memory::Out& out_;
  int row_ = 0, column_;  // of the tile; column_ at or after the last column: no tile
  uint32_t pairs_[kProjectionColumns / 4];
};

// One of the warpgroups that sum.
template <class T>
class ProjectionConsumer {
 public:
  using Memory = ProjectionMemory<T>;
  using Writer = ProjectionWriter<T>;

  __device__ __forceinline__ ProjectionConsumer(const ProjectionArguments& in, Memory& memory)
      : in_(in), memory_(memory), writer_(in, memory), group_(threadIdx.x / 128 - 1) {}

  __device__ __forceinline__ void Run() {
    const int tiles = in_.Tiles();
    const int row = group_ * 64 + threadIdx.x % 128 / 32 * kProjectionBoxRows;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sums[kProjectionColumns / 2];
      before_ = -1, step_ = 0;
      SumParts(sums, std::make_integer_sequence<int, Writer::kParts>());
      hopper::Wait<0>();
      hopper::Keep(sums);
      memory_.free[before_].ArriveAsWarp();
      writer_.Take(in_.Row(tile) + row, in_.Column(tile), sums);
    }
    writer_.Finish();
  }

 private:
  template <int... kEach>
  __device__ __forceinline__ void SumParts(float (&sums)[kProjectionColumns / 2],
                                           std::integer_sequence<int, kEach...>) {
    (SumPart<kEach>(sums), ...);
  }

  // Runs the steps of one part of a tile. Writes a part of the previous tile while the first step
  // runs.
  template <int kPart>
  __device__ __forceinline__ void SumPart(float (&sums)[kProjectionColumns / 2]) {
    const int end = (kPart + 1) * in_.Steps() / Writer::kParts;
    if (kPart == 0 || step_ < end) Step(sums);
    writer_.template Write<kPart>();
    while (step_ < end) Step(sums);
  }

  // Begins a step, and waits for the previous one.
  __device__ __forceinline__ void Step(float (&sums)[kProjectionColumns / 2]) {
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
                            hopper::Advance(w, i * hopper::kNextRows), i > 0 || step_ > 0);
    }
    hopper::Commit();
    hopper::Wait<1>();
    if (before_ >= 0) memory_.free[before_].ArriveAsWarp();
    before_ = turn_.stage;
    turn_.Next<Memory::kStages>();
    ++step_;
  }

  const ProjectionArguments& in_;
  Memory& memory_;
  Writer writer_;
  const int group_;
  int step_ = 0;     // the tile's next step
  int before_ = -1;  // the stage whose products may still run
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

#endif  // GMETA_OPS_LAYER_SILU_PROJECTION_CUH_
